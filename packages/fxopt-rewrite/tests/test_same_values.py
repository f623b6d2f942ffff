from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from site_passes import Called, exported, nodes_of
from torch import Tensor
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import iter_nodes
from fxopt_rewrite import GraphIndex


def same(graph_module: GraphModule, one: str, other: str, reader: str = "output") -> bool:
    """Return whether two nodes make the same value, as far as a reader gets it."""
    nodes = nodes_of(graph_module)
    return GraphIndex(graph_module).same_value(nodes[other], nodes[reader]) is nodes[one]


ALIKE: dict[str, Callable[[Any], Any]] = {
    "constants": lambda x: (x.view(-1, 4), x.view(-1, 4)),
    "keyword": lambda x: (x.view(size=(-1, 4)), x.view(size=(-1, 4))),
    "size": lambda x: (x.view(-1, x.size(-1)), x.view(-1, x.size(-1))),
    "shape": lambda x: (x.view(-1, x.shape[2]), x.view(-1, x.shape[2])),
    "dtype": lambda x: (x.view(torch.int32), x.view(torch.int32)),
    "chain": lambda x: (x.transpose(0, 1).view(-1, 4), x.transpose(0, 1).view(-1, 4)),
    "after a view": lambda x: (x.unsqueeze(0).view(-1, 4), x.unsqueeze(0).view(-1, 4)),
}
DIFFERENT: dict[str, Callable[[Any], Any]] = {
    "sizes": lambda x: (x.view(-1, 4), x.view(-1, 2)),
    "kinds of number": lambda x: (x.view(-1, 1), x.view(-1, True)),
    "dimension": lambda x: (x.view(-1, x.size(-1)), x.view(-1, x.size(0))),
    "values": lambda x: (x.view(-1, 4), (x + 1).view(-1, 4)),
    "methods": lambda x: (x.view(-1, 4), x.reshape(-1, 4)),
    "random": lambda x: (torch.rand_like(x), torch.rand_like(x)),
}


@pytest.mark.parametrize("name", [*ALIKE, *DIFFERENT])
def test_views_with_equal_arguments_are_one_value(name: str) -> None:
    graph_module = symbolic_trace({**ALIKE, **DIFFERENT}[name])
    *_, output = iter_nodes(graph_module.graph)
    one, other = output.all_input_nodes
    assert same(graph_module, one.name, other.name) == (name in ALIKE)


def test_operators_of_an_export() -> None:
    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(-1, 4).relu(), x.view(-1, 4).tanh()

    assert same(exported(Called(call), torch.randn(2, 3, 4)), "view", "view_1", "tanh")


def test_long_chains_of_slices_are_read() -> None:
    def call(x: Any) -> Any:
        for _ in range(1000):
            x = x[:]
        return x, x

    assert same(symbolic_trace(call), "getitem_999", "getitem_999")


def _write_between(x: Any) -> Any:
    first = x.view(-1, 4)
    x.add_(1)
    return first.relu(), x.view(-1, 4).tanh()


def _write_after_both(x: Any) -> Any:
    first, second = x.view(-1, 4), x.view(-1, 4)
    second.add_(1)
    return first.relu(), second.tanh()


def _resized_between(x: Any) -> Any:
    first = x.view(x.size(0), -1)
    x.resize_(1, 2, 4)
    return first.relu(), x.view(x.size(0), -1).tanh()


@pytest.mark.parametrize("call", [_write_between, _write_after_both, _resized_between])
def test_a_write_keeps_values_apart(call: Callable[[Any], Any]) -> None:
    assert not same(symbolic_trace(call), "view", "view_1", "tanh")


def test_what_is_read_before_the_write_is_the_same() -> None:
    def call(x: Any) -> Any:
        first, second = x.view(-1, 4).relu(), x.view(-1, 4).tanh()
        x.add_(1)
        return first, second

    assert same(symbolic_trace(call), "view", "view_1", "tanh")


def test_views_after_a_write_are_alike_again() -> None:
    def call(x: Any) -> Any:
        first = x.view(-1, 4).sum()
        x.add_(1)
        return first, x.view(-1, 4).relu(), x.view(-1, 4).tanh()

    graph_module = symbolic_trace(call)
    assert same(graph_module, "view_1", "view_2", "tanh")
    assert not same(graph_module, "view", "view_1", "relu")


def test_it_takes_linear_time(steps_of: Callable[[Callable[[], object]], int]) -> None:
    def steps(views: int) -> int:
        graph_module = symbolic_trace(lambda x: [x.view(-1, 4).relu() for _ in range(views)])
        index = GraphIndex(graph_module)
        output = index.nodes[-1]
        _ = index.effects
        return steps_of(lambda: [index.same_value(node, output) for node in index.nodes])

    assert steps(400) < 2.6 * steps(200)


def test_a_view_that_nothing_can_be_like_costs_little(steps_of: Callable[[Callable[[], object]], int]) -> None:
    def steps(call: Callable[[Any], Any]) -> int:
        index = GraphIndex(symbolic_trace(call))
        output = index.nodes[-1]
        _ = index.effects
        return steps_of(lambda: [index.same_value(node, output) for node in index.nodes])

    alone = steps(lambda x: [(x + number).view(-1, 4) for number in range(100)])
    assert alone < steps(lambda x: [x.view(-1, 4 + number) for number in range(100)]) / 2
