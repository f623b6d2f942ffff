"""`EliminateCommonSubexpressions`: equal calls are made once, where nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from simplify_models import Repeats, X
from site_passes import Called, Computes
from torch import Tensor, nn

from fxopt_core import iter_nodes
from fxopt_simplify import EliminateCommonSubexpressions
from fxopt_testing import assert_rewrites
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import graph_of, refused

FORMS: tuple[Form, ...] = ("modules", "functions", "export-dynamic")
CSE = EliminateCommonSubexpressions()


@pytest.mark.parametrize("form", FORMS)
def test_calls_of_functions_methods_and_modules_are_made_once(form: Form) -> None:
    """The layer, the activation after it, and the positions: what follows an equal call is equal, too."""
    graph_module = graph_of(Repeats(), form, X)
    expected = graph_module(X)
    CSE(graph_module)
    assert refused(graph_module) == []
    torch.testing.assert_close(graph_module(X), expected, rtol=0.0, atol=0.0)
    called = [node.name for node in iter_nodes(graph_module.graph)]
    for name in ("linear" if form != "modules" else "fc", "gelu" if form != "modules" else "act", "arange"):
        assert sum(name in node and "weight" not in node for node in called) == 1, called


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.relu().mul(1) - x.relu().mul(1.0),
        lambda x: x.relu().mul(0.0) - x.relu().mul(-0.0),
        lambda x: x.relu().mul(True) - x.relu().mul(1),
    ],
    ids=["1 and 1.0", "0.0 and -0.0", "True and 1"],
)
def test_literals_are_equal_by_type_and_bits(function: Callable[[Tensor], Any]) -> None:
    assert_rewrites(CSE, Called(function), X, count=1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.rand_like(x) - torch.rand_like(x),
        lambda x: F.dropout(x, 0.5, True) - F.dropout(x, 0.5, True),
        lambda x: torch.empty_like(x).fill_(1.0) - torch.empty_like(x).fill_(2.0),
        lambda x: torch.relu_(x * 1) - torch.bernoulli(x.sigmoid()) + torch.bernoulli(x.relu()),
    ],
    ids=["random numbers", "dropout", "memory without values", "samples"],
)
def test_calls_that_may_give_something_else_stay(function: Callable[[Tensor], Any]) -> None:
    CSE(torch.fx.symbolic_trace(Called(function)), expect=0)


def test_a_value_that_was_written_between_is_computed_again() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        before = y.abs() + 1
        y.add_(3)
        return before * (y.abs() + 1)

    assert_rewrites(CSE, Called(function), X, count=0, gradients=False)


def test_a_parameter_that_is_written_between_is_read_again() -> None:
    class Counts(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            before = x + self.seen
            self.seen.add_(1)
            return before * (x + self.seen)

    CSE(graph_of(Counts(), "functions", X), expect=0)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: (x.relu(), x.relu()), "returned"),
        (lambda x: (x.relu(), x.relu() + 1), "returned"),
        (lambda x: x.relu() + x.relu().abs_(), "mutated"),
        (lambda x: (x.relu()[1:], x.relu()[0] + 1), "returned"),
    ],
)
def test_two_tensors_stay_two_where_somebody_can_tell(function: Callable[[Tensor], Any], reason: str) -> None:
    graph_module = assert_rewrites(CSE, Called(function), X, count=0, gradients=False)
    assert {code for _, code in refused(graph_module)} == {reason}


def test_batch_norm_in_train_mode_counts_each_call() -> None:
    model = Computes(lambda m, x: m.norm(x) - m.norm(x) * 2, norm=nn.BatchNorm1d(4))
    CSE(graph_of(model.train(), "modules", X), expect=0)
    assert_rewrites(CSE, model.eval(), X, count=1)


def test_hooks_see_each_call() -> None:
    model = Repeats()
    model.fc.register_forward_hook(lambda module, args, output: output + 1)
    graph_module = CSE(torch.fx.symbolic_trace(model))
    assert [str(node.target) for node in iter_nodes(graph_module.graph)].count("fc") == 2
