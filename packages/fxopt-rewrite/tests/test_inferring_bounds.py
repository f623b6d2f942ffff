"""Shape inference computes no number and no sequence that would take long or fill the memory."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from fxopt_core import PreconditionError
from fxopt_rewrite import infer_shapes
from fxopt_rewrite.shapes import effort
from fxopt_rewrite.shapes.effort import TooMuchError, excess


def graph_of(target: Any, *args: Any) -> GraphModule:
    """Return a graph with one call; of a method, if the target is text."""
    graph = Graph()
    x = graph.placeholder("x")
    operation = "call_method" if isinstance(target, str) else "call_function"
    made = graph.create_node(operation, target, tuple(x if arg is ... else arg for arg in args))
    graph.output((x, made))
    return GraphModule(nn.Module(), graph)


TOO_MUCH: dict[str, tuple[Any, ...]] = {
    "a power": (operator.pow, 10, 10**9),
    "a builtin power": (pow, 10, 10**9),
    "a shift": (operator.lshift, 1, 10**12),
    "a factorial": (math.factorial, 10**7),
    "combinations": (math.comb, 10**8, 5 * 10**7),
    "permutations": (math.perm, 10**7),
    "a product": (math.prod, [2**4000, 2**4000]),
    "rounding": (round, 5, -(10**9)),
    "a repeated list": (operator.mul, [0], 10**11),
    "a repeated tuple": (operator.mul, 10**11, (0,)),
    "a repeated text": (operator.mul, "ab", 10**11),
    "a list of a range": (list, range(10**11)),
    "a sum of a range": (sum, range(10**11)),
    "a search": (operator.contains, range(10**30), 0.5),
    "a tensor in a million parts": (torch.unbind, ...),
    "a tensor as a tuple": (tuple, ...),
    "a split": ("split", ..., 1),
    "chunks": ("chunk", ..., 10**9),
}


@pytest.mark.parametrize("call", TOO_MUCH.values(), ids=TOO_MUCH)
def test_what_is_too_much_is_one_error_before_it_is_computed(call: tuple[Any, ...]) -> None:
    with pytest.raises(TooMuchError, match=r"node `\w+` \(call_.*\) makes an? (integer|sequence) of \d+"):
        infer_shapes(graph_of(*call), torch.empty(10**9, device="meta"))


def test_what_doubles_from_node_to_node_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "_NESTED", 1000)  # each step below takes its time
    for combine in (operator.add, lambda a, b: (a, b)):
        graph = Graph()
        value: Any = graph.call_function(operator.add, ((graph.placeholder("x"),), (0,)))
        for _ in range(60):
            value = graph.call_function(combine, (value, value))
        graph.output(value)
        with pytest.raises(TooMuchError, match=r"makes (more than|a sequence of) "):
            infer_shapes(GraphModule(nn.Module(), graph), torch.ones(2))


def test_a_square_of_a_square_ends() -> None:
    graph = Graph()
    graph.placeholder("x")
    value: Any = 10
    for _ in range(60):
        value = graph.call_function(operator.mul, (value, value))
    graph.output(value)
    with pytest.raises(TooMuchError, match="an integer of"):
        infer_shapes(GraphModule(nn.Module(), graph), torch.ones(2))


class Holder(nn.Module):
    """Holds a graph module."""

    def __init__(self, inner: GraphModule) -> None:
        super().__init__()
        self.inner = inner


def power_of(number: int) -> GraphModule:
    """Return a graph with a graph module inside that computes a power of 10."""
    inner, outer = Graph(), Graph()
    value, exponent = inner.placeholder("value"), inner.placeholder("exponent")
    inner.output((value, inner.call_function(pow, (10, exponent))))
    x = outer.placeholder("x")
    outer.output(outer.call_module("inner", (x,), {"exponent": number}))
    return GraphModule(Holder(GraphModule(nn.Module(), inner)), outer)


def test_graph_modules_inside_are_bounded_too() -> None:
    x = torch.ones(2)
    graph_module = infer_shapes(power_of(3), x)
    assert graph_module.graph.output_node().meta["val"][1] == 1000
    assert graph_module(x)[1] == 1000
    with pytest.raises(TooMuchError, match=r"node `inner` \(.*a GraphModule.*\) makes an integer of 4000000000 bits"):
        infer_shapes(power_of(10**9), x)


def test_a_graph_module_that_an_operator_calls_is_bounded_too() -> None:
    graph_module = power_of(10**9)
    graph = Graph()
    x, inner = graph.placeholder("x"), graph.get_attr("inner")
    graph.output(graph.call_function(torch.ops.higher_order.wrap_with_set_grad_enabled, (False, inner, x, 10**9)))
    with pytest.raises(PreconditionError, match="makes an integer of 4000000000 bits"):
        infer_shapes(GraphModule(graph_module, graph), x=torch.ones(2))


ENOUGH: dict[str, tuple[Any, ...]] = {
    "a power": (operator.pow, 10, 9),
    "a power of a tensor": (operator.pow, ..., 2),
    "a sum of a large tensor": (torch.sum, ...),
    "the largest of a large tensor": (torch.ops.aten.amax.default, ...),
    "parts": ("chunk", ..., 4),
    "rounding": (round, 12345, -2),
    "a negative shift of nothing": (operator.lshift, 1, 40),
}


@pytest.mark.parametrize("call", ENOUGH.values(), ids=ENOUGH)
def test_what_models_compute_is_inferred(call: tuple[Any, ...]) -> None:
    infer_shapes(graph_of(*call), torch.empty(10**9, device="meta"))


@pytest.mark.parametrize("call", [(operator.floordiv, 1, 0), (int, "x")])
def test_other_errors_are_what_they_were(call: tuple[Callable[..., Any], Any]) -> None:
    with pytest.raises(PreconditionError) as caught:
        infer_shapes(graph_of(*call), torch.ones(2))
    assert type(caught.value) is PreconditionError


def test_reversed_operands() -> None:
    assert excess("__rpow__", (10**9, 2)) == "an integer of 2000000000 bits"
    assert excess("__rpow__", (2, 10**9)) is None
    assert excess("__rlshift__", (10**9, 1)) is not None
    assert excess(operator.ipow, (-10, 10**9)) == "an integer of 4000000000 bits"
    assert excess(operator.imul, ([0], 10**9)) == "a sequence of 1000000000 items"
