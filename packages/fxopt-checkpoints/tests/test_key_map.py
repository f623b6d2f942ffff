from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from checkpoint_passes import Fold, Join, model, traced
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_checkpoints.tensor_map import Assembly, Derivation, Destination, OriginalTensor
from fxopt_checkpoints.trace import key_map
from fxopt_core import Derived, FxoptError, compose, undo


def rewritten(*passes: Any) -> GraphModule:
    result: GraphModule = compose(*passes)(traced(model()))
    return result


BOTH = (Join(), Fold())


class TestWhatItSays:
    def test_originals_are_all_entries_in_order(self) -> None:
        before = traced(model())
        keys = list(before.state_dict())
        found = key_map(compose(*BOTH)(before))
        assert list(found.original_keys) == keys
        rows = found.by_key
        assert rows["q.weight"] == OriginalTensor("q.weight", (8, 4), torch.float32, kept=False)
        assert rows["out.bias"] == OriginalTensor("out.bias", (3,), torch.float32)
        assert rows["k.bias"].shape is None and not rows["k.bias"].in_state_dict
        assert rows["scratch"] == OriginalTensor("scratch", (2,), torch.float32, "buffer", persistent=False)

    def test_steps_say_how_new_tensors_come_about(self) -> None:
        found = key_map(rewritten(*BOTH))
        weight, bias, folded = found.steps
        assert isinstance(weight, Assembly) and isinstance(bias, Assembly) and isinstance(folded, Derivation)
        assert [(part.source, part.piece.slices) for part in weight.parts] == [
            ("q.weight", ((0, 0, 8),)),
            ("k.weight", ((0, 8, 2),)),
            ("v.weight", ((0, 10, 2),)),
        ]
        assert [(fill.piece.slices, fill.value) for fill in bias.fills] == [(((0, 8, 2),), 0.0)]
        assert (weight.target.key, weight.target.shape, weight.pass_name) == ("joined.weight", (12, 4), "join")
        assert dict(folded.inputs)["mean"] == "norm.running_mean" and folded.pass_name == "fold"

    def test_ties_are_groups_of_keys(self) -> None:
        assert key_map(rewritten()).ties == (("two.weight", "one.weight"),)

    def test_it_holds_no_tensors_and_does_not_change(self) -> None:
        found = key_map(rewritten(*BOTH))
        assert len(pickle.dumps(found)) < 10_000
        assert pickle.loads(pickle.dumps(found)) == found == key_map(rewritten(*BOTH))
        with pytest.raises(FrozenInstanceError):
            found.ties = ()  # type: ignore[misc]  # on purpose

    def test_undone_passes_do_not_count(self) -> None:
        assert key_map(undo(rewritten(Join()))) == key_map(rewritten())
        assert key_map(rewritten()).steps == ()

    def test_later_passes_build_on_earlier_ones(self) -> None:
        """Two layers are joined, and the joined ones with a third."""
        found = key_map(twice_joined())
        assert list(found.assemblies) == ["joined.weight", "joined.bias", "joined_1.weight", "joined_1.bias"]
        assert [target.key for target in found.new_tensors] == ["joined_1.weight", "joined_1.bias"]
        pieces = [piece.slices for place in found.destinations("b.bias") for piece in place.pieces]
        assert pieces == [((0, 0, 6),), ((0, 2, 4),)]

    def test_destinations(self) -> None:
        found = key_map(rewritten(*BOTH))
        assert found.destinations("out.weight") == (Destination("out.weight"),)
        (place,) = found.destinations("v.bias")
        assert (place.key, place.derived) == ("joined.bias", False)
        assert place.take(torch.arange(12)).tolist() == [10, 11]
        assert found.destinations("norm.running_var") == (Destination("norm.running_var", (), derived=True),)
        assert found.destinations("norm.num_batches_tracked") == ()
        with pytest.raises(FxoptError, match="the original model has no `nowhere`"):
            found.destinations("nowhere")

    def test_it_prints_as_a_table(self) -> None:
        text = str(key_map(rewritten(*BOTH)))
        lines = [" ".join(line.split()) for line in text.splitlines()]
        assert lines[0] == "original shape now"
        assert "v.weight (2, 4) joined.weight[10:12]" in lines
        assert "(0 stands in) joined.bias[8:10]" in lines
        assert "mid.weight (6, 8) mid_folded.weight, mid_folded.bias by fold" in lines
        assert "norm.num_batches_tracked () not kept" in lines
        assert lines[-1] == "7 other keys are unchanged"


class Twice(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b, self.c = nn.Linear(3, 2), nn.Linear(3, 4), nn.Linear(3, 1)
        self.eval()

    def forward(self, x: Tensor) -> Any:
        return self.a(x), self.b(x), self.c(x)


class JoinTwo(Join):
    """Joins the first two only."""

    def match(self, index: Any) -> Any:
        for group in super().match(index):
            yield replace(group, calls=group.calls[:2])


class JoinAll(Join):
    """Joins what is there."""


def twice_joined(seed: int = 0) -> GraphModule:
    result: GraphModule = compose(JoinTwo(), JoinAll())(torch.fx.symbolic_trace(Twice(seed)))
    return result


class TestVllm:
    def test_packed_modules_are_merged_layers_with_their_parts_in_order(self) -> None:
        assert key_map(rewritten(*BOTH)).vllm_packed_modules_mapping() == {"joined": ["q", "k", "v"]}
        assert key_map(rewritten(Join(sort=True))).vllm_packed_modules_mapping() == {"joined": ["v", "k", "q"]}
        assert key_map(twice_joined()).vllm_packed_modules_mapping() == {"joined_1": ["a", "b", "c"]}
        assert key_map(rewritten()).vllm_packed_modules_mapping() == {}

    def test_stacked_parameters_have_their_place(self) -> None:
        found = key_map(compose(Join())(torch.fx.symbolic_trace(Named(Twice()))))
        expected = {
            "layers.attention.a.weight": ("layers.attention.joined.weight", 0),
            "layers.attention.b.weight": ("layers.attention.joined.weight", 1),
            "layers.attention.c.weight": ("layers.attention.joined.weight", 2),
        }
        stacked = found.vllm_orig_to_new_stacked()
        biases = {key.replace("weight", "bias"): (m.replace("weight", "bias"), n) for key, (m, n) in expected.items()}
        assert stacked == expected | biases
        for key in found.original_keys:
            assert as_vllm_maps(key, stacked) == stacked.get(key, (key, None))

    def test_what_it_cannot_say_is_an_error(self) -> None:
        with pytest.raises(FxoptError, match=r"`joined\.bias` has rows where 0 stands in .* leave them unfilled"):
            key_map(rewritten(Join())).vllm_orig_to_new_stacked()
        with pytest.raises(FxoptError, match=r"`mid\.weight` is computed together with others\n") as caught:
            key_map(rewritten(Fold())).vllm_orig_to_new_stacked()
        assert "`norm.num_batches_tracked` is dropped" in str(caught.value)

    def test_names_inside_others_are_an_error(self) -> None:
        """vLLM replaces the text wherever it stands."""
        module = Twice()
        module.add_module("xa", nn.Linear(1, 1))
        graph_module = torch.fx.symbolic_trace(module)
        graph_module.add_submodule("xa", nn.Linear(1, 1))
        with pytest.raises(FxoptError, match=r"`xa\.weight` contains the text of another entry, .* `xjoined\.weight`"):
            key_map(Join()(graph_module)).vllm_orig_to_new_stacked()


class Named(nn.Module):
    """Gives a module a longer name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"attention": module})

    def forward(self, x: Tensor) -> Any:
        return self.layers["attention"](x)


def as_vllm_maps(key: str, stacked: dict[str, tuple[str, int]]) -> tuple[str, int | None]:
    """Do as vLLM's WeightsMapper does: replace the text of each entry in turn."""
    number = None
    for text, (new, shard) in stacked.items():
        if text in key:
            key, number = key.replace(text, new, 1), shard
    return key, number


class TestLedgersOfOthers:
    def test_a_pass_has_to_name_what_it_derives(self) -> None:
        class Wrong(Fold):
            def rewrite(self, site: Any, edit: Any) -> None:
                super().rewrite(site, edit)
                edit.derived(Derived("a:b", (("x", "nowhere"),), (), ()))

        with pytest.raises(FxoptError, match="pass `wrong` recorded that `a:b` computes tensors with `nowhere`"):
            key_map(Wrong()(traced(model())))
