"""RoundedValues: who rounds or compares a value later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_arith.rounding import RoundedValues
from fxopt_core import iter_nodes
from fxopt_rewrite.index import GraphIndex
from fxopt_rewrite.shapes.infer import infer_shapes
from fxopt_testing import count_steps
from fxopt_testing.rewrites import setitem


def rounded_by(function: Callable[..., Any], *inputs: Tensor) -> dict[str, str | None]:
    """Return for each node of a function the node that rounds it later."""
    graph_module = torch.fx.symbolic_trace(function)
    if inputs:
        infer_shapes(graph_module, *inputs)
    found = RoundedValues(GraphIndex(graph_module))
    names = {node: found.by(node) for node in iter_nodes(graph_module.graph)}
    return {node.name: None if by is None else by.name for node, by in names.items()}


def test_the_search_goes_through_elementwise_operations_and_views() -> None:
    found = rounded_by(lambda x: torch.floor((torch.relu(x) + 1).view(-1).exp()))
    assert found == {
        "x": "floor",
        "relu": "floor",
        "add": "floor",
        "view": "floor",
        "exp": "floor",
        "floor": None,
        "output": None,
    }


def test_it_stops_at_matrix_products() -> None:
    found = rounded_by(lambda x: torch.floor(torch.relu(x) @ x))
    assert (found["relu"], found["matmul"]) == (None, "floor")


def test_values_that_nothing_rounds() -> None:
    assert set(rounded_by(lambda x: torch.relu(x) / 3).values()) == {None}


def test_setitem_carries_into_what_is_written() -> None:
    def function(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        z = torch.relu(x)[0]
        setitem(y, 0, z)
        return y.floor()

    assert rounded_by(function)["relu"] in {"floor", "setitem"}  # the dtype of y is not known without shapes
    assert rounded_by(function, torch.ones(3))["relu"] == "floor"


def test_integers_that_follow_from_known_dtypes() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(x).to(y)

    assert rounded_by(function)["relu"] == "to"
    assert rounded_by(function, torch.ones(3), torch.ones(3))["relu"] is None
    assert rounded_by(function, torch.ones(3), torch.ones(3, dtype=torch.long))["relu"] == "to"


def test_what_selects_is_compared_and_what_is_selected_from_is_not() -> None:
    found = rounded_by(lambda x, y: torch.relu(x)[torch.abs(y)])
    assert (found["relu"], found["abs_1"]) == (None, "getitem")


def test_unknown_functions_count_as_rounding() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    relu = graph.call_function(torch.relu, (x,))
    graph.output(graph.call_function(rounded_by, (relu,)))
    found = RoundedValues(GraphIndex(GraphModule(nn.Module(), graph)))
    assert found.by(relu) is not None


def test_it_is_linear_in_the_size_of_the_graph() -> None:
    def chain(length: int) -> GraphModule:
        graph = torch.fx.Graph()
        value = hub = graph.placeholder("x")
        for _ in range(length):
            value = graph.call_function(torch.add, (value, hub))
        graph.output(graph.call_function(torch.floor, (value,)))
        return GraphModule(nn.Module(), graph)

    def steps(length: int) -> int:
        index = GraphIndex(chain(length))
        return count_steps(lambda: RoundedValues(index))

    steps(10)  # what is found out once is found out here
    assert steps(1000) < 4.2 * steps(250)
