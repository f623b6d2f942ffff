"""Weights that weights alone decide become parameters: bit for bit, and checkpoints still load."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from simplify_models import WEIGHED, Adapted, Standardised
from site_passes import Computes
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from fxopt_capture import capture, load, save
from fxopt_checkpoints import load_original_state_dict
from fxopt_core import history, registry
from fxopt_simplify import FoldWeights
from fxopt_testing import assert_rewrites
from fxopt_testing.forms import Form


@pytest.mark.parametrize("name", WEIGHED)
def test_the_layer_reads_a_parameter(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = WEIGHED[name]().eval(), torch.randn(2, 4, 8)
    graph_module = FoldWeights()(capture(model, (x,)), expect=1)
    layers = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    assert all(argument.op in ("placeholder", "get_attr") for argument in layers[0].all_input_nodes)
    assert torch.equal(graph_module(x), model(x))
    assert all(weight.requires_grad for weight in graph_module.parameters())
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.5).add_(0.1)
    for each in (graph_module, pickle.loads(pickle.dumps(graph_module))):
        load_original_state_dict(each, other.state_dict())
        assert torch.equal(each(x), other(x))
    save(graph_module, tmp_path / "model.fxopt")
    again = load(tmp_path / "model.fxopt")
    load_original_state_dict(again, model.state_dict())
    assert torch.equal(again(x), model(x))


FORMS: tuple[Form, ...] = ("functions", "export", "export-dynamic")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [Adapted, lambda: Standardised(4, 6, 3)], ids=["low rank", "standardised"])
def test_in_each_form(make: Callable[[], nn.Module], form: Form) -> None:
    assert_rewrites(FoldWeights(), make().eval(), torch.randn(2, 4, 8), count=1, form=form)


class Odd(nn.Module):
    """A product of two weights, one of which something else reads as well, or that is no weight of a layer."""

    table: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.register_buffer("table", torch.randn(8, 8), persistent=False)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        weight = self.first @ self.second
        if self.kind == "read elsewhere":
            return F.linear(x, weight) + self.first
        if self.kind == "tied":
            return F.linear(F.linear(x, self.first), self.first.t())
        if self.kind == "no weight":
            return F.linear(weight, x)
        if self.kind == "returned":
            return F.linear(x, weight), weight
        if self.kind == "not in checkpoints":
            return F.linear(x, self.first * self.table)
        return F.linear(x, weight) + weight.relu_()


@pytest.mark.parametrize("kind", ["read elsewhere", "tied", "no weight", "returned", "not in checkpoints", "written"])
def test_left_alone(kind: str) -> None:
    model, x = Odd(kind).eval(), torch.randn(8, 8)
    graph_module = FoldWeights()(capture(model, (x,)), expect=0)
    torch.testing.assert_close(graph_module(x), model(x))
    assert sorted(graph_module.state_dict()) == ["first", "second"]


def test_frozen_weights_stay_frozen_and_no_large_weight_is_made_of_small_ones() -> None:
    for size, count in ((8, 1), (2200, 0)):
        a, b = nn.Parameter(torch.randn(2, size)), nn.Parameter(torch.randn(size, 2))
        model = Computes(lambda m, x: F.linear(x, m.b @ m.a), a=a, b=b).eval().requires_grad_(False)
        graph_module = FoldWeights()(capture(model, (torch.randn(1, size),)), expect=count)
        assert not any(weight.requires_grad for weight in graph_module.parameters())
    assert not history(graph_module)[-1].derived


class Gained(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(input=x, weight=self.weight * 0.5, bias=self.bias * 2)


def test_weight_and_bias_by_keyword_are_packed_and_checkpoints_load() -> None:
    pytest.importorskip("fxopt_cpu")
    model, other, x = Gained(4, 4).eval(), Gained(4, 4).eval(), torch.randn(2, 4)
    graph_module = FoldWeights()(torch.fx.symbolic_trace(model), expect=2)
    assert torch.equal(graph_module(x), model(x))
    packed = registry().pipeline("fold-weights,fuse-linears")(capture(model, (x,)))
    load_original_state_dict(packed, other.state_dict())
    torch.testing.assert_close(packed(x), other(x))


def test_parametrized_root() -> None:
    graph_module = FoldWeights()(capture(weight_norm(nn.Linear(4, 4)).eval(), (torch.randn(2, 4),)), expect=1)
    assert [*graph_module.state_dict()] == ["bias", "weight_folded.weight"]


def test_training_and_mixed_flags_are_refused() -> None:
    x = torch.randn(2, 4, 8)
    mixed = Adapted().eval()
    mixed.weight.requires_grad_(False)
    for model, reason in ((Adapted().train(), "training"), (mixed, "mixed-requires-grad")):
        graph_module = FoldWeights()(capture(model, (x,)), expect=0)
        assert [refusal.reason for refusal in history(graph_module)[-1].refusals] == [reason]
