"""`read_elementwise`: sums, differences, products and quotients in every form of graph."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import Graph

from fxopt_rewrite import ElementwiseCall, Obstacle, read_elementwise

aten = torch.ops.aten

# what is called, its keywords, and: operation, whether operands are exchanged, alpha, rounding mode, in place
CASES: list[tuple[Any, dict[str, Any], tuple[Any, ...]]] = [
    (operator.add, {}, ("add", False, 1, None, False)),
    (operator.isub, {}, ("sub", False, 1, None, True)),
    (torch.add, {"alpha": 2}, ("add", False, 2, None, False)),
    (torch.rsub, {"alpha": 3}, ("sub", True, 3, None, False)),
    (torch.div, {"rounding_mode": "floor"}, ("div", False, 1, "floor", False)),
    ("multiply_", {}, ("mul", False, 1, None, True)),
    ("add_", {"alpha": 0.5}, ("add", False, 0.5, None, True)),
    (aten.mul_.Tensor, {}, ("mul", False, 1, None, True)),
    (aten.rsub.Scalar, {}, ("sub", True, 1, None, False)),
    (aten.div.Tensor_mode, {"rounding_mode": "trunc"}, ("div", False, 1, "trunc", False)),
]


def called(graph: Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.fx.Node:
    call: Any = graph.call_method if isinstance(target, str) else graph.call_function
    node: torch.fx.Node = call(target, args, kwargs)
    return node


@pytest.mark.parametrize(("target", "kwargs", "wanted"), CASES)
def test_every_form_is_read(target: Any, kwargs: dict[str, Any], wanted: tuple[Any, ...]) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    call = read_elementwise(called(graph, target, (x, 2), kwargs))
    assert isinstance(call, ElementwiseCall)
    found = (call.operation, call.right is x, call.alpha, call.rounding_mode, call.inplace)
    assert found == wanted
    assert {call.left, call.right} == {x, 2}


def test_arguments_by_name_and_by_place() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    by_name = read_elementwise(graph.call_function(torch.mul, (), {"other": 2, "input": x}))
    by_place = read_elementwise(graph.call_function(aten.add.Scalar, (x, 2, 3)))
    assert isinstance(by_name, ElementwiseCall)
    assert isinstance(by_place, ElementwiseCall)
    assert (by_name.left, by_name.right) == (x, 2)
    assert by_place.alpha == 3


def test_what_is_no_such_call() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    for target in (torch.relu, operator.floordiv, torch.floor_divide, operator.matmul, "pow", lambda *_: None):
        assert read_elementwise(called(graph, target, (x, 2), {})) is None
    assert read_elementwise(x) is None
    for key in ("out", "alpha"):
        assert isinstance(read_elementwise(called(graph, torch.add, (x, x), {key: x})), Obstacle)
