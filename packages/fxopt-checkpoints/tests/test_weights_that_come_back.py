"""Weights that come back from folds: what a pass gives for the way back is refused unless it computes the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import checkpoint_passes
import pytest
import torch
from checkpoint_passes import Fold, Join, model, traced
from torch import Tensor
from torch.fx import GraphModule, Node

from fxopt_checkpoints import load_original_state_dict, original_state_dict
from fxopt_core import CheckpointError, Derived, NotReversibleError, compose
from fxopt_rewrite import Editor, GraphIndex, LinearCall, SitePass, read_linear

Back = Callable[[dict[str, Tensor]], Any]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
unfold = checkpoint_passes.unfold


def folded(dtype: torch.dtype = torch.float32) -> GraphModule:
    return Fold()(traced(model())).to(dtype)


def going_back_by(monkeypatch: pytest.MonkeyPatch, change: Back) -> None:
    """Let the pass go back as it does, and change what that gives."""

    def changed(weight: Tensor, bias: Tensor, **settings: Any) -> Any:
        return change(unfold(weight, bias, **settings))

    monkeypatch.setattr(checkpoint_passes, "unfold", changed)


def without(name: str) -> Back:
    return lambda found: {key: value for key, value in found.items() if key != name}


def changed(name: str, change: Callable[[Tensor], Any]) -> Back:
    return lambda found: {**found, name: change(found[name])}


WRONG: dict[str, tuple[Back, str]] = {
    "a tensor left out": (without("bias"), r"gives a NoneType as `bias` \(`mid\.bias`\), expected \(6,\)"),
    "None for a tensor": (changed("mean", lambda x: None), r"gives a NoneType as `mean` \(`norm\.running_mean`\)"),
    "one name too many": (
        lambda found: {**found, "scale": found["var"]},
        "gives `scale`, which is not among the tensors",
    ),
    "another shape": (changed("var", lambda x: x[:1]), r"gives \(1,\) of torch.* as `var` .*, expected \(6,\)"),
    "another kind of dtype": (
        changed("mean", lambda x: x.long()),
        r"gives \(6,\) of torch\.int64 as `mean` .* expected",
    ),
    "no tensor": (changed("mean", lambda x: 0.0), r"gives a float as `mean` .*, expected \(6,\)"),
    "no mapping": (lambda found: tuple(found.values()), "gives a tuple, expected a mapping of names to tensors"),
    "one wrong channel": (changed("bias", lambda x: x + (torch.arange(6) == 3)), "1 of 6 elements differs, by up to 1"),
    "another scale": (changed("var", lambda x: x * 4), r"a `mid_folded\.weight`.*48 of 48"),
}


class TestRefusals:
    @pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
    @pytest.mark.parametrize("wrong", WRONG)
    def test_what_does_not_give_the_present_values(
        self, wrong: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The error names pass, group and tensor, what differs and what to do, and is one of checkpoints, too."""
        graph_module = folded(dtype)
        before = {key: value.clone() for key, value in graph_module.state_dict().items()}
        change, message = WRONG[wrong]
        going_back_by(monkeypatch, change)
        with pytest.raises(NotReversibleError, match=message) as caught:
            original_state_dict(graph_module)
        text = str(caught.value)
        assert isinstance(caught.value, CheckpointError) and caught.value.pass_name == "fold"
        assert "`mid_folded.weight`, `mid_folded.bias` (pass `fold`): " in text
        assert text.count("keep the original checkpoint, or save graph_module.state_dict()") == 1
        assert all(torch.equal(value, before[key]) for key, value in graph_module.state_dict().items())

    @pytest.mark.parametrize("error", [1e-5, -3e-6])
    def test_float32_shows_what_bfloat16_cannot(self, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
        """A forgotten eps is far beyond rounding in one, and below it in the other."""
        going_back_by(monkeypatch, changed("var", lambda x: x + error))
        original_state_dict(folded(torch.bfloat16))
        with pytest.raises(NotReversibleError, match="where rounding explains"):
            original_state_dict(folded())

    def test_all_sites_are_named_with_one_remedy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A model of two folds that do not go back, one of them with a reason of its own."""
        graph_module = Fold()(traced(torch.nn.Sequential(model(), model(1)).eval()))
        going_back_by(monkeypatch, without("bias"))
        with pytest.raises(NotReversibleError) as caught:
            original_state_dict(graph_module)
        assert (
            str(caught.value).count("gives a NoneType as `bias`") == 2
            and str(caught.value).count("report this to the author") == 1
        )

    def test_functions_may_not_write_into_what_they_are_given(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Neither way harms the module: the way back gets copies, and the way there is refused."""
        graph_module, fold = folded(), checkpoint_passes.fold
        before = {key: value.clone() for key, value in graph_module.state_dict().items()}
        monkeypatch.setattr(checkpoint_passes, "unfold", lambda w, b, **kwargs: unfold(w.mul_(2), b, **kwargs))
        with pytest.raises(NotReversibleError, match=r"a `mid_folded\.weight`"):
            original_state_dict(graph_module)
        monkeypatch.setattr(checkpoint_passes, "unfold", unfold)
        monkeypatch.setattr(checkpoint_passes, "fold", lambda weight, **kwargs: fold(weight.mul_(2), **kwargs))
        with pytest.raises(CheckpointError, match=r"`checkpoint_passes:fold`, by which pass `fold`.* writes into"):
            original_state_dict(graph_module)
        assert all(torch.equal(value, before[key]) for key, value in graph_module.state_dict().items())


class TestRight:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("order", ["fold", "join, fold", "fold, join"])
    def test_what_comes_back_computes_the_same(self, order: str, dtype: torch.dtype) -> None:
        """Folded in float32 and converted, and trained since: a bias, a weight near zero, one that is zero."""
        passes = {"fold": (Fold(),), "join, fold": (Join(), Fold()), "fold, join": (Fold(), Join(sort=True))}[order]
        graph_module = compose(*passes)(traced(model())).to(dtype)
        with torch.no_grad():
            tensors = dict(graph_module.named_parameters())
            for name, tensor in tensors.items():
                if "mid_folded" in name:
                    tensor[0] = 0.0
                    tensor[1] *= 1e-6
                    tensor[2] *= 300.0 if dtype is torch.float16 else 3e4
        before = {key: value.clone() for key, value in graph_module.state_dict().items()}
        saved = original_state_dict(graph_module)
        assert list(saved) == list(traced(model()).state_dict())
        assert all(value.dtype in (dtype, torch.int64) for value in saved.values())
        load_original_state_dict(graph_module, saved)
        for key, value in graph_module.state_dict().items():
            torch.testing.assert_close(value, before[key], rtol=2e-2 if dtype.itemsize == 2 else 1e-6, atol=0)

    @pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
    def test_rounding_is_no_mistake(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        """A pass that divides by a scale instead of setting it to one, so that every value is rounded twice."""

        def divided(found: dict[str, Tensor]) -> dict[str, Tensor]:
            scale = torch.rsqrt(torch.linspace(1e-4, 300.0, 6) + 1e-5).to(torch.float32)
            weight = (found["weight"].float() / scale[:, None]).to(dtype)
            bias = (found["bias"].float() / scale).to(dtype)
            return {**found, "weight": weight, "bias": bias, "var": torch.linspace(1e-4, 300.0, 6)}

        graph_module = folded(dtype)
        going_back_by(monkeypatch, divided)
        original_state_dict(graph_module)

    def test_a_constant_that_a_pass_gives_each_time_is_copied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        constant = torch.zeros(6)
        going_back_by(monkeypatch, lambda found: {**found, "mean": constant})
        saved = original_state_dict(folded())
        assert saved["norm.running_mean"].data_ptr() != constant.data_ptr()


def test_a_new_tensor_of_unknown_origin_is_no_key_of_the_original() -> None:
    """A pass that records how the weight is computed, and forgets the bias that it puts in."""

    class Forgetful(Fold):
        """Records the weight alone."""

        def rewrite(self, site: Any, edit: Any) -> None:
            record = edit.derived
            edit.derived = lambda derived: record(
                dataclasses.replace(derived, outputs=(derived.outputs[0], None), function="checkpoint_passes:fold")
            )
            super().rewrite(site, edit)

    graph_module = Forgetful()(traced(model()))
    with pytest.raises(NotReversibleError):
        original_state_dict(graph_module)


@dataclasses.dataclass(frozen=True, eq=False)
class Scaled:
    """A product with a parameter, and the layers that read it."""

    product: Node
    layers: tuple[LinearCall, ...]
    label: str = "scale"

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.product, *(call.node for call in self.layers)


def scaled(weight: Tensor, scale: Tensor) -> Tensor:
    return weight * scale


def with_ones(weight: Tensor, *, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {"weight": weight, "scale": weight.new_ones(shapes["scale"])}


def with_a_scale_of_its_own(weight: Tensor, *, shapes: Mapping[str, Any]) -> dict[str, Tensor]:
    scale = weight.abs().amax(0)
    return {"weight": weight / scale, "scale": scale}


class FoldScale(SitePass[Scaled]):
    """``linear(x * scale)`` -> ``scaled_linear(x)`` for all layers that read the product."""

    arithmetic = (scaled, with_ones, with_a_scale_of_its_own)

    def __init__(self, *, back: str = "with_ones") -> None:
        self.back = back

    def match(self, index: GraphIndex) -> Iterator[Scaled]:
        found = [read_linear(index, node) for node in index.nodes if not self.transformed(node)]
        calls = tuple(call for call in found if isinstance(call, LinearCall))
        if calls:
            yield Scaled(calls[0].input, calls)

    def rewrite(self, site: Scaled, edit: Editor) -> None:
        x = site.product.args[0]
        for call in site.layers:
            module = torch.nn.Linear(call.in_features, call.out_features, bias=False)
            scale = edit.graph_module.get_parameter("scale").detach()
            module.weight = torch.nn.Parameter(scaled(call.weight.tensor.detach(), scale))
            name = edit.add_module(call.label, f"{call.label}_scaled", module)
            edit.replace(call.node, edit.call_module(name, x, before=call.node, like=[call.node]))
            inputs = (("weight", call.weight.name), ("scale", "scale"))
            back = f"{__name__}:{self.back}"
            edit.derived(Derived(f"{__name__}:scaled", inputs, (), (f"{name}.weight",), back))
            edit.drop(call, {}, twin=name)
        edit.erase(site.product)
        edit.drop_tensor("scale", None)


class Branches(torch.nn.Module):
    """Two layers that read one scaled value."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([0.5, 1.5, 2.5, 3.5]))
        self.q, self.k = torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Any:
        y = x * self.scale
        return self.q(y), self.k(y)


class TestSharedInputs:
    """Several groups are computed from one tensor: what counts is the one value that the checkpoint has of it."""

    def test_groups_that_agree_on_it_come_back(self) -> None:
        graph_module, x = FoldScale()(torch.fx.symbolic_trace(Branches())), torch.randn(3, 4)
        original = Branches()
        original.load_state_dict(original_state_dict(graph_module))
        torch.testing.assert_close(original(x), graph_module(x))

    def test_groups_that_give_it_different_values_are_refused(self) -> None:
        graph_module = FoldScale(back="with_a_scale_of_its_own")(torch.fx.symbolic_trace(Branches()))
        with pytest.raises(NotReversibleError, match=r"computes a `k_scaled\.weight`|a `q_scaled\.weight`"):
            original_state_dict(graph_module)
