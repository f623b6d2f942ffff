"""A change of a global mode between two nodes keeps them apart."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from fxopt_rewrite import Effects


def between(*calls: tuple[object, ...]) -> tuple[GraphModule, Node, Node, Node]:
    """Return a graph that calls functions between two reads of its input, with the input and the reads."""
    graph = Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.neg, (x,))
    entered: list[Node] = []
    for function, *arguments in calls:
        assert callable(function)
        entered.append(graph.call_function(function, tuple(entered[-1] if a is ... else a for a in arguments)))  # type: ignore[misc]  # arguments of any kind
    second = graph.call_function(torch.abs, (x,))
    graph.output((first, second))
    return GraphModule(torch.nn.Module(), graph), x, first, second


def test_gradients_that_are_switched_off() -> None:
    graph_module, x, first, second = between((torch._C._set_grad_enabled, False))
    assert Effects(graph_module).written_between(x, first, second)


def test_autocast_that_is_entered_and_left() -> None:
    enter, leave = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
    graph_module, x, first, second = between((enter, "cpu", torch.bfloat16, True, True), (leave, ...))
    assert Effects(graph_module).written_between(x, first, second)


def test_other_calls_change_no_mode() -> None:
    graph_module, x, first, second = between((torch.zeros, 2), (torch.neg, ...))
    assert not Effects(graph_module).written_between(x, first, second)
