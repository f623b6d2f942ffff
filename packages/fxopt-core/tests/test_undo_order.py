"""Passes that are undone in another order than last first, where a later one replaced what an earlier one has read."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node, symbolic_trace

from fxopt_core import Editor, GraphIndex, ReversibleSitePass, UndoError, history, iter_nodes, undo


@dataclass(frozen=True, eq=False)
class Call:
    node: Node

    @property
    def label(self) -> str:
        return self.node.name

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.node,)


class Retarget(ReversibleSitePass[Call]):
    """``f(x)`` -> ``g(x)``."""

    def __init__(self, *, old: str, new: str) -> None:
        self.old, self.new = old, new

    def match(self, index: GraphIndex) -> Iterator[Call]:
        for node in index.nodes:
            if node.target is getattr(torch, self.old):
                yield Call(node)

    def rewrite(self, site: Call, edit: Editor) -> None:
        arguments: Any = site.node.args
        new = edit.call_function(getattr(torch, self.new), *arguments, before=site.node, like=[site.node])
        edit.replace(site.node, new)


class Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(torch.sin(x))
        return torch.add(torch.neg(y), torch.sub(y, torch.sin(y)))


PASSES = {
    "sin": Retarget(old="sin", new="cos"),
    "relu": Retarget(old="relu", new="tanh"),
    "neg": Retarget(old="neg", new="exp"),
    "sub": Retarget(old="sub", new="mul"),
    "again": Retarget(old="cos", new="erf"),
}
SOME = ("sin", "relu", "neg", "sub")


def state(graph_module: GraphModule) -> object:
    users = [{user.name for user in node.users} for node in iter_nodes(graph_module.graph)]
    return str(graph_module.graph), graph_module.code, users


@pytest.mark.parametrize("back", list(itertools.permutations(SOME)), ids=" ".join)
@pytest.mark.parametrize("order", [SOME, SOME[::-1], ("relu", "sub", "sin", "neg")], ids=" ".join)
def test_every_order_brings_the_original_back(order: tuple[str, ...], back: tuple[str, ...]) -> None:
    graph_module = symbolic_trace(Chain())
    original, value = state(graph_module), torch.randn(3)
    for name in order:
        PASSES[name](graph_module)
    left = list(order)
    for name in back:
        PASSES[name](graph_module, reverse=True)
        left.remove(name)
        expected = symbolic_trace(Chain())
        for other in left:
            PASSES[other](expected)
        torch.testing.assert_close(graph_module(value), expected(value), rtol=0, atol=0)
        assert [node.op for node in iter_nodes(graph_module.graph)] == [node.op for node in iter_nodes(expected.graph)]
    assert state(graph_module) == original
    assert {record.state for record in history(graph_module)} == {"undone"}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))], ids=["copy", "pickle"])
def test_so_do_copies(copied: Callable[[GraphModule], GraphModule]) -> None:
    graph_module = symbolic_trace(Chain())
    code = graph_module.code
    for name in SOME[::-1]:
        PASSES[name](graph_module)
    for name in SOME[::-1]:
        graph_module = PASSES[name](copied(graph_module), reverse=True)
    assert graph_module.code == code


def test_what_was_replaced_twice_is_followed() -> None:
    graph_module = symbolic_trace(Chain())
    code = graph_module.code
    for name in ("relu", "sin", "again"):
        PASSES[name](graph_module)
    PASSES["relu"](graph_module, reverse=True)
    assert "erf = torch.erf(x)" in graph_module.code and "relu = torch.relu(erf)" in graph_module.code
    assert undo(undo(graph_module)).code == code


def test_a_later_pass_that_replaced_the_result_is_in_the_way() -> None:
    graph_module = PASSES["again"](PASSES["sin"](symbolic_trace(Chain())))
    before = state(graph_module)
    with pytest.raises(UndoError, match="0 nodes for its replacement, expected exactly one, so it was changed since"):
        PASSES["sin"](graph_module, reverse=True)
    assert state(graph_module) == before


def test_a_change_by_hand_is_none_of_a_pass() -> None:
    graph_module = PASSES["neg"](symbolic_trace(Chain()))
    (exp,) = (node for node in iter_nodes(graph_module.graph) if node.target is torch.exp)
    exp.args = (next(iter_nodes(graph_module.graph)),)
    with pytest.raises(UndoError, match="node `exp`, which the pass made, was changed since"):
        PASSES["neg"](graph_module, reverse=True)
