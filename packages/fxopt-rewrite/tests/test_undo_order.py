"""Passes undone in another order than last first: refused where a later one builds on them, exact elsewhere."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from site_passes import Call, Retarget
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import UndoError, history, iter_nodes
from fxopt_rewrite import Editor, GraphIndex, Piece, ReversibleSitePass


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


NEIGHBOURS = [{"sin", "relu"}, {"relu", "neg"}, {"relu", "sub"}, {"sin", "sub"}]  # one reads the other


def reverse_if_allowed(graph_module: GraphModule, name: str, applied: list[str]) -> bool:
    """Reverse a pass; where a later one is its neighbour, check that this is refused and changes nothing."""
    later = applied[applied.index(name) + 1 :]
    if not any({name, other} in NEIGHBOURS for other in later):
        PASSES[name](graph_module, reverse=True)
        return True
    before = state(graph_module)
    with pytest.raises(UndoError, match=r"cannot undo `retarget`: .*undo `retarget` first"):
        PASSES[name](graph_module, reverse=True)
    assert state(graph_module) == before
    return False


ORDERS = itertools.cycle([SOME, SOME[::-1], ("relu", "sub", "sin", "neg")])
PAIRS = list(zip(itertools.permutations(SOME), ORDERS, strict=False))
DAILY = PAIRS[::4]  # each pass is taken back first, and each order of applying them is there twice


@pytest.mark.parametrize(
    ("back", "order"),
    [pytest.param(*pair, marks=() if pair in DAILY else pytest.mark.nightly) for pair in PAIRS],
    ids=" ".join,
)
def test_every_allowed_order_brings_the_original_back(order: tuple[str, ...], back: tuple[str, ...]) -> None:
    graph_module = symbolic_trace(Chain())
    original, value = state(graph_module), torch.randn(3)
    for name in order:
        PASSES[name](graph_module)
    left = list(order)
    while left:
        for name in (name for name in back if name in left):
            if not reverse_if_allowed(graph_module, name, left):
                continue
            left.remove(name)
            expected = symbolic_trace(Chain())
            for other in left:
                PASSES[other](expected)
            assert graph_module.code == expected.code
            torch.testing.assert_close(graph_module(value), expected(value), rtol=0, atol=0)
    assert state(graph_module) == original
    assert {record.state for record in history(graph_module)} == {"undone"}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))], ids=["copy", "pickle"])
def test_so_do_copies(copied: Callable[[GraphModule], GraphModule]) -> None:
    graph_module = symbolic_trace(Chain())
    code = graph_module.code
    for name in ("neg", "sin"):
        PASSES[name](graph_module)
    for name in ("neg", "sin"):
        graph_module = PASSES[name](copied(graph_module), reverse=True)
    assert graph_module.code == code


def test_a_later_pass_that_replaced_the_result_is_in_the_way() -> None:
    graph_module = PASSES["again"](PASSES["sin"](symbolic_trace(Chain())))
    before = state(graph_module)
    with pytest.raises(UndoError, match="pass `retarget` ran after it and builds on its result"):
        PASSES["sin"](graph_module, reverse=True)
    assert state(graph_module) == before
    PASSES["sin"](PASSES["again"](graph_module, reverse=True), reverse=True)
    assert graph_module.code == symbolic_trace(Chain()).code


def test_a_change_by_hand_is_none_of_a_pass() -> None:
    graph_module = PASSES["neg"](symbolic_trace(Chain()))
    (exp,) = (node for node in iter_nodes(graph_module.graph) if node.target is torch.exp)
    exp.args = (next(iter_nodes(graph_module.graph)),)
    with pytest.raises(UndoError, match="node `exp`, which the pass made, was changed since"):
        PASSES["neg"](graph_module, reverse=True)


class Again(ReversibleSitePass[Call]):
    """Put a layer of the same values in place of another one."""

    def __init__(self, *, layer: str) -> None:
        self.layer = layer

    def match(self, index: GraphIndex) -> Iterator[Call]:
        yield from (Call(node) for node in index.nodes if node.target == self.layer)

    def rewrite(self, site: Call, edit: Editor) -> None:
        old: Any = edit.graph_module.get_submodule(self.layer)
        name = edit.add_module(self.layer, f"{self.layer}_again", copy.deepcopy(old))
        new = edit.call_module(name, *site.node.args, before=site.node, like=[site.node])
        edit.replace(site.node, new)
        edit.drop_module(self.layer, {key: Piece(f"{name}.{key}") for key in ("weight", "bias")}, twin=name)


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(2, 2) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.a(x), self.b(x), self.c(x), self.d(x)


@pytest.mark.parametrize("back", list(itertools.permutations("bd")), ids=" ".join)
def test_layers_come_back_in_their_order(back: tuple[str, ...]) -> None:
    graph_module = symbolic_trace(Parallel())
    keys, original = list(graph_module.state_dict()), state(graph_module)
    passes = {name: Again(layer=name) for name in "bd"}
    for name in "bd":
        passes[name](graph_module, expect=1)
    for name in back:
        passes[name](graph_module, reverse=True)
    assert (list(graph_module.state_dict()), state(graph_module)) == (keys, original)


@pytest.mark.parametrize("pair", ["ab", "bc", "cb"])
def test_neighbouring_layers_come_back_last_first(pair: str) -> None:
    """Where the second was taken out, the first was gone, or the other way round: its place says too little."""
    graph_module = symbolic_trace(Parallel())
    keys, original = list(graph_module.state_dict()), state(graph_module)
    first, second = (Again(layer=name) for name in pair)
    between = state(second(first(graph_module)))
    with pytest.raises(UndoError, match=r"pass `again` ran after it and builds on its result.*undo `again` first"):
        first(graph_module, reverse=True)
    assert state(graph_module) == between
    first(second(graph_module, reverse=True), reverse=True)
    assert (list(graph_module.state_dict()), state(graph_module)) == (keys, original)
