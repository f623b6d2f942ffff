"""Reversing where there is nothing to undo changes nothing, whatever the pass's own `reverse` does."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import ReversibleTransformation, compose, history, iter_nodes, undo


class Doubled(ReversibleTransformation):
    """`3 * x` -> `6 * x`, without a mark; what it reverses it does not look for."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return scaled(graph_module, 2)

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        return scaled(graph_module, 0.5)


class Marked(Doubled):
    """The same with marks."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in iter_nodes(graph_module.graph):
            if node.op == "call_module":
                self.mark_as_transformed(node)
        return super().transform(graph_module)

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        for node in iter_nodes(graph_module.graph):
            if node.op == "call_module":
                self.mark_as_restored(node)
        return super().reverse(graph_module)


class WithLambda(Doubled):
    """A pass that has no signature."""

    def __init__(self, *, function: object = None) -> None:
        self.function = function


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.identity = nn.Identity()

    def forward(self, x: torch.Tensor) -> object:
        return 3 * self.identity(x)


def scaled(graph_module: GraphModule, factor: float) -> GraphModule:
    for node in iter_nodes(graph_module.graph):
        if node.target is operator.mul:
            number, value = node.args
            assert isinstance(number, (int, float))
            node.args = (number * factor, value)
    return graph_module


def traced() -> GraphModule:
    return symbolic_trace(Scale())


def factor_of(graph_module: GraphModule) -> float:
    return float(graph_module(torch.tensor(1.0)))


@pytest.mark.parametrize("transformation", [Doubled(), Marked(), compose(Doubled(), Marked())], ids=repr)
class TestReverse:
    def test_of_what_was_never_applied(self, transformation: ReversibleTransformation) -> None:
        graph_module = traced()
        assert transformation(graph_module, reverse=True) is graph_module
        assert factor_of(graph_module) == 3
        assert history(graph_module) == ()

    @pytest.mark.parametrize("copied", [lambda g: g, copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))])
    def test_a_second_time_and_on_a_copy(
        self, transformation: ReversibleTransformation, copied: Callable[[GraphModule], GraphModule]
    ) -> None:
        graph_module = copied(transformation(traced()))
        for _ in range(2):
            transformation(graph_module, reverse=True)
            assert factor_of(graph_module) == 3
        undo(graph_module)
        assert factor_of(graph_module) == 3


class TestSeveralRuns:
    @pytest.mark.parametrize("twice", [compose(Doubled(), Doubled()), None], ids=["composed", "run twice"])
    def test_a_pass_without_marks_takes_back_one_run_at_a_time(self, twice: ReversibleTransformation | None) -> None:
        graph_module, doubled = traced(), Doubled()
        graph_module = twice(graph_module) if twice else doubled(doubled(graph_module))
        for left, states in ((6, "applied undone"), (3, "undone undone"), (3, "undone undone")):
            doubled(graph_module, reverse=True)
            assert factor_of(graph_module) == left
            assert " ".join(record.state for record in history(graph_module)) == states

    def test_a_composition_of_equal_passes_is_reversed_as_a_whole(self) -> None:
        passes = compose(Doubled(), Doubled())
        graph_module = passes(traced())
        assert factor_of(graph_module) == 12
        for _ in range(2):
            passes(graph_module, reverse=True)
            assert factor_of(graph_module) == 3

    def test_undo_after_one_of_two_was_reversed(self) -> None:
        graph_module = Doubled()(Doubled()(traced()))
        Doubled()(graph_module, reverse=True)
        assert factor_of(undo(graph_module)) == 3

    def test_a_pass_without_a_signature_is_always_reversed(self) -> None:
        graph_module = WithLambda(function=lambda: 1)(traced())
        WithLambda(function=lambda: 2)(graph_module, reverse=True)
        assert factor_of(graph_module) == 3
