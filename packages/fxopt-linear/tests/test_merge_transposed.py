"""Layers whose weight is stored as (in, out): ``Conv1D`` of GPT-2, ``torch.addmm``, ``x @ weight``."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from site_passes import Computes, Conv1D
from torch import Tensor, nn
from torch.fx import GraphModule, Tracer

from fxopt_linear import FuseBiasInLinear, MergeLinears
from fxopt_testing import assert_rewrites
from fxopt_testing.forms import TRACED, Form
from fxopt_testing.rewrites import graph_of, refused, structure


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the class of these tests be that of transformers, so that undoing finds it there."""
    module = types.ModuleType("transformers.pytorch_utils")
    module.Conv1D = Conv1D  # type: ignore[attr-defined]  # a module made for the test
    monkeypatch.setattr(Conv1D, "__module__", "transformers.pytorch_utils")
    monkeypatch.setitem(sys.modules, "transformers.pytorch_utils", module)


def both(m: Any, x: Tensor) -> Any:
    return m.q(x).relu().sum(-1), m.k(x).tanh()


def pair(call: Callable[[Any, Tensor], Any] = both) -> Any:
    """Two of them, of unequal sizes, and parameters for what else is called."""
    square = nn.Parameter(torch.randn(4, 4))
    return Computes(call, q=Conv1D(6, 4), k=Conv1D(3, 4), usual=nn.Linear(4, 5), square=square).eval()


def on_one_view(m: Any, x: Tensor) -> Any:
    """Call both as the class does, on one view: equal views are made one by `EliminateCommonSubexpressions`."""
    flat, rows = x.view(-1, 4), x.size()[:-1]
    q, k = torch.addmm(m.q.bias, flat, m.q.weight), torch.addmm(m.k.bias, flat, m.k.weight)
    return q.view(rows + (6,)).relu().sum(-1), k.view(rows + (3,)).tanh()  # noqa: RUF005  # a proxy is not unpacked


def leaves(model: nn.Module) -> GraphModule:
    class Leaves(Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, Conv1D) or super().is_leaf_module(m, module_qualified_name)

    return GraphModule(model, Leaves().trace(model))


# By day, dynamic sizes stand for fixed ones.
FORMS = [*TRACED, "export-dynamic", pytest.param("export", marks=pytest.mark.nightly)]


@pytest.mark.parametrize("form", FORMS)
def test_groups_of_unequal_size_merge_in_every_form(form: Form) -> None:
    model = pair(on_one_view)
    others = [(torch.randn(5, 3, 4),), (torch.randn(0, 3, 4),), (torch.randn(2, 3, 4),)]
    merged = assert_rewrites(MergeLinears(), model, torch.randn(3, 3, 4), count=1, form=form, others=others)
    assert repr(merged.q_k_merged) == "Linear(in_features=4, out_features=9, bias=True)"
    weight = torch.cat([model.q.weight, model.k.weight], dim=1).t()
    assert torch.equal(merged.q_k_merged.weight, weight)  # type: ignore[union-attr, arg-type]  # it is a Linear
    assert not {"q.weight", "q.bias", "k.weight", "k.bias"} & set(merged.state_dict())


def test_modules_called_as_such(known: None) -> None:
    model = pair()
    graph_module, x = leaves(model), torch.randn(2, 3, 4)
    start, expected = structure(graph_module), graph_module(x)
    MergeLinears()(graph_module, expect=1)
    assert [name for name, _ in graph_module.named_children()] == ["q_k_merged"]
    for one, other in zip(graph_module(x), expected, strict=True):
        torch.testing.assert_close(one, other)
    MergeLinears()(graph_module, reverse=True)
    assert type(graph_module.q) is Conv1D
    assert structure(graph_module) == start


PRODUCTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "operator": lambda m, x: ((x @ m.q.weight).relu(), (x @ m.k.weight).tanh()),
    "matmul": lambda m, x: (torch.matmul(x, m.q.weight) + m.q.bias, torch.matmul(x, m.k.weight).tanh()),
    "beside a layer": lambda m, x: ((x @ m.q.weight).relu(), m.usual(x).tanh()),
    "one addmm": lambda m, x: (torch.addmm(m.q.bias, x[0], m.q.weight).relu(), (x[0] @ m.k.weight).tanh()),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_parameters(name: str) -> None:
    sites = 1 if name != "one addmm" else 0  # `x[0]` twice is two values
    assert_rewrites(MergeLinears(), pair(PRODUCTS[name]), torch.randn(3, 3, 4), count=sites)


def test_one_weight_read_both_ways_is_left_alone() -> None:
    model = pair(lambda m, x: (F.linear(x, m.square).relu(), (x @ m.square).tanh(), m.usual(x).exp()))
    merged = assert_rewrites(MergeLinears(), model, torch.randn(3, 4), count=0)
    assert [reason for _, reason in refused(merged)][:2] == ["tied-parameter"] * 2


def test_a_weight_that_is_a_transposed_view_comes_back_as_one() -> None:
    model = pair(lambda m, x: (m.usual(x).relu(), m.other(x).tanh(), (x @ m.square).exp()))
    model.usual.weight = nn.Parameter(torch.randn(4, 5).t())
    model.square = nn.Parameter(torch.randn(4, 4).t())
    model.other = nn.Linear(4, 3)
    graph_module = graph_of(model, "modules", torch.randn(3, 4))
    before = {key: value.stride() for key, value in graph_module.state_dict().items()}
    MergeLinears()(graph_module, expect=1)
    MergeLinears()(graph_module, reverse=True)
    assert {key: value.stride() for key, value in graph_module.state_dict().items()} == before
    assert_rewrites(MergeLinears(), model, torch.randn(3, 4), count=1)


def test_biases_fuse_in_every_form() -> None:
    assert_rewrites(FuseBiasInLinear(), pair(), torch.randn(3, 3, 4), count=2, others=[(torch.randn(5, 3, 4),)])
