"""`CastToBfloat16`: where bfloat16 begins and ends, what stays in float32, and what becomes of dtypes."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt_capture import capture, load, save
from fxopt_checkpoints import load_original_state_dict, original_state_dict
from fxopt_core import NotReversibleError, iter_nodes, undo
from fxopt_cpu import CastToBfloat16
from fxopt_rewrite import infer_shapes
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import FORMS, fingerprint, graph_of, refused, structure

NARROW = torch.bfloat16
X = torch.randn(2, 5, 16)

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor has no instructions for bfloat16"
)


class Attention(nn.Module):
    """Attention with a residual sum and a normalisation, and a mask of floats if asked for one."""

    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)
        self.masked = masked

    def forward(self, x: Tensor) -> Any:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, 2, 8).transpose(1, 2) for t in self.qkv(x).split(16, -1))
        mask = torch.zeros(length, length).masked_fill_(torch.ones(length, length).triu(1) > 0, -3.4028234663852886e38)
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask if self.masked else None)
        return self.norm(x + self.out(heads.transpose(1, 2).reshape(batch, length, width)))


class Gated(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Convolutions(nn.Module):
    """Two convolutions with a pooling between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.pool(self.first(x)))


class Around(nn.Module):
    """Something after a layer."""

    def __init__(self, after: Any) -> None:
        super().__init__()
        self.dense, self.after = nn.Linear(16, 16), after

    def forward(self, x: Tensor) -> Any:
        return self.after(self.dense(x))


@torch.no_grad()
def sqnr(found: nn.Module, model: nn.Module, x: Tensor) -> float:
    """Signal over error of a graph, in dB."""
    expected = model(x)
    return float(10 * torch.log10(expected.square().sum() / (found(x) - expected).square().sum()))


def casts(graph_module: GraphModule) -> int:
    """How many casts a graph has."""
    return sum(node.target == "to" for node in iter_nodes(graph_module.graph))


def computed(graph_module: GraphModule, x: Tensor) -> dict[str, torch.dtype]:
    """The dtype of each tensor that a graph computes, by the name of its node."""
    found: dict[str, torch.dtype] = {}

    class Watching(torch.fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, Tensor):
                found[n.name] = value.dtype
            return value

    with torch.no_grad():
        Watching(graph_module).run(x)
    return found


# --- What is computed where


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("model", "x", "sites", "left"),
    [(Gated(), X, 3, 2), (Convolutions(), torch.randn(2, 3, 12, 12), 2, 2)],
    ids=["gated", "convolutions"],
)
def test_between_layers_there_are_no_casts(form: Form, model: nn.Module, x: Tensor, sites: int, left: int) -> None:
    model.eval()
    before = fingerprint(model)
    graph_module = CastToBfloat16()(graph_of(model, form, x))
    assert casts(graph_module) == left
    assert sum(parameter.dtype == NARROW for parameter in graph_module.parameters()) == 2 * sites
    with torch.no_grad():
        assert graph_module(x).dtype == torch.float32
    assert sqnr(graph_module, model, x) > 40
    assert fingerprint(model) == before
    once = structure(graph_module)
    CastToBfloat16()(graph_module, expect=0)
    assert structure(graph_module) == once


@pytest.mark.parametrize("form", ["export", "capture"])
def test_attention_is_narrow_and_residual_sums_and_norms_are_wide(form: Form) -> None:
    model = Attention().eval()
    graph_module = CastToBfloat16()(graph_of(model, form, X))
    found = computed(graph_module, X)
    assert all(found[name] == NARROW for name in found if name.startswith("scaled_dot_product"))
    assert all(found[name] == torch.float32 for name in found if name.startswith(("add", "norm", "layer_norm")))
    assert sqnr(graph_module, model, X) > 40


@pytest.mark.parametrize("form", ["export", "capture"])
def test_a_mask_of_the_smallest_floats_does_not_become_infinite(form: Form) -> None:
    model = Attention(masked=True).eval()
    graph_module = CastToBfloat16()(graph_of(model, form, X))
    with torch.no_grad():
        assert bool(graph_module(X).isfinite().all())
    assert sqnr(graph_module, model, X) > 40


WIDE_ONES = {
    "softmax": lambda y: torch.softmax(y, -1),
    "exp": torch.exp,
    "sum": lambda y: y.sum(-1),
    "mean": lambda y: y.mean(-1),
    "masked_fill": lambda y: y.masked_fill(y > 0, torch.finfo(torch.float32).min),
    "scalar": lambda y: torch.add(y, -3.4e38),
    "float tensor": lambda y: y + torch.ones(16),
    "item": lambda y: y > y.mean(),
    "norm": lambda y: y.norm(),
    "cumsum": lambda y: y.cumsum(-1),
    "twice": lambda y: (y, torch.softmax(y, -1)),
}


@pytest.mark.parametrize("name", WIDE_ONES)
@pytest.mark.parametrize("form", ["modules", "export"])
def test_what_is_not_known_to_be_safe_reads_float32(name: str, form: Form) -> None:
    model = Around(WIDE_ONES[name]).eval()
    graph_module = CastToBfloat16()(graph_of(model, form, X))
    found = computed(graph_module, X)
    assert list(found.values()).count(NARROW) == 2, found
    with torch.no_grad():
        for one, other in zip(_leaves(graph_module(X)), _leaves(model(X)), strict=True):
            assert one.dtype == other.dtype


def _leaves(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def in_place(y: Tensor) -> Tensor:
    """Write a result in place, and read it twice."""
    z = y.view(-1)
    y.mul_(2.0)
    return z + y.view(-1)


@pytest.mark.parametrize("form", ["modules", "export"])
@pytest.mark.parametrize("after", [in_place, nn.ReLU(inplace=True), F.relu_], ids=["view", "module", "function"])
def test_writing_a_result_in_place_is_seen_by_its_views(after: Any, form: Form) -> None:
    model = Around(after).eval()
    graph_module = CastToBfloat16()(graph_of(model, form, X))
    assert sqnr(graph_module, model, X) > 40


def test_an_input_that_is_written_between_two_layers_is_cast_twice() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Any:
            one = self.a(x)
            x.mul_(3.0)
            return one + self.b(x)

    model = Written().eval()
    graph_module = CastToBfloat16()(graph_of(model, "modules", X.clone()))
    with torch.no_grad():
        expected, found = model(X.clone()), graph_module(X.clone())
    assert float(10 * torch.log10(expected.square().sum() / (found - expected).square().sum())) > 40


def test_two_layers_share_the_cast_of_their_input() -> None:
    assert casts(CastToBfloat16()(infer_shapes(torch.fx.symbolic_trace(Gated().eval()), X))) == 2


def test_integer_inputs_stay_integers() -> None:
    model = nn.Sequential(nn.Embedding(7, 16), nn.Linear(16, 4)).eval()
    graph_module = CastToBfloat16()(torch.fx.symbolic_trace(model))
    ids = torch.tensor([[1, 6]])
    assert computed(graph_module, ids)["input_1"] == torch.int64
    assert sqnr(graph_module, model, ids) > 40


# --- What is refused


def test_what_cannot_be_cast_is_refused() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))).eval()
    model[1].weight = model[0].weight
    model[2].register_forward_hook(lambda *_: None)
    model[3].double()
    model[4].train()
    graph_module = CastToBfloat16(where="[0-4]")(torch.fx.symbolic_trace(model), expect=0)
    assert dict(refused(graph_module)) == {
        "0": "tied-parameter",
        "1": "tied-parameter",
        "2": "hooks",
        "3": "unsupported-dtype",
        "4": "training",
        "5": "filtered",
    }


def test_layers_in_bfloat16_are_left_out_without_a_word() -> None:
    graph_module = CastToBfloat16()(torch.fx.symbolic_trace(Gated().eval().bfloat16()), expect=0, strict=True)
    assert casts(graph_module) == 0


# --- Checkpoints, travel


def test_a_checkpoint_of_the_original_is_rounded_when_it_is_loaded() -> None:
    graph_module, other = CastToBfloat16()(graph_of(Gated().eval(), "modules", X)), Gated().eval()
    load_original_state_dict(graph_module, other.state_dict())
    assert sqnr(graph_module, other, X) > 40


class Transposed(nn.Module):
    """A weight stored as (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 8) / 4), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Any:
        return torch.addmm(self.bias, x, self.weight)


def test_transposed_weights_are_turned_by_checkpoints_too() -> None:
    model, other, x = Transposed().eval(), Transposed().eval(), torch.randn(3, 16)
    graph_module = CastToBfloat16()(graph_of(model, "functions", x), expect=1)
    assert sqnr(graph_module, model, x) > 40
    load_original_state_dict(graph_module, other.state_dict())
    assert sqnr(graph_module, other, x) > 40


def test_there_is_no_way_back() -> None:
    graph_module = CastToBfloat16()(graph_of(Gated().eval(), "modules", X))
    for way in (undo, original_state_dict):
        with pytest.raises(NotReversibleError, match="cast-to-bfloat16"):
            way(graph_module)


def test_copies_pickles_and_archives_compute_the_same(tmp_path: Path) -> None:
    graph_module = CastToBfloat16()(capture(Gated().eval(), (X,)))
    expected = graph_module(X)
    save(graph_module, tmp_path / "narrow.fxopt")
    for again in (
        copy.deepcopy(graph_module),
        pickle.loads(pickle.dumps(graph_module)),
        load(tmp_path / "narrow.fxopt"),
    ):
        assert torch.equal(again(X), expected)


def test_gradients_reach_the_input() -> None:
    x = X.clone().requires_grad_()
    CastToBfloat16()(graph_of(Gated().eval(), "modules", X))(x).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


def test_the_accuracy_is_promised() -> None:
    promised = CastToBfloat16.promised_sqnr
    assert promised is not None and not CastToBfloat16.preserves_computation
    model = Attention().eval()
    assert sqnr(CastToBfloat16()(graph_of(model, "capture", X)), model, X) > promised
