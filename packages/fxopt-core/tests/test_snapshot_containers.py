"""What containers hold comes back at any depth, into the very same containers."""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.fx import GraphModule

from fxopt_core import PassError, Transformation, iter_nodes


class Pair(NamedTuple):
    left: list[int]
    right: int


class Labels(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise AssertionError("a rollback calls nothing that a subclass defines")


def full_of(leaf: Any) -> dict[str, Any]:
    """One container of each kind, each with something in it."""
    return {
        "dict": {"list": [leaf, {"set": {1, 2}}]},
        "ordered": OrderedDict(first=[leaf], second=2),
        "default": defaultdict(list, key=[leaf]),
        "counter": Counter("aab"),
        "deque": deque([[leaf], 2], maxlen=3),
        "bytes": bytearray(b"abc"),
        "tuple": (1, (2, [leaf]), Pair([leaf], 2)),
        "empty": [deque(maxlen=2), {}, [], set()],
        "subclass": Labels({"inner": [leaf]}),
    }


def spoil(value: Any) -> None:
    """Change every container, the innermost ones first."""
    inside = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple, deque)):
        for item in list(inside):
            spoil(item)
    if isinstance(value, dict):
        dict.clear(value)
        dict.__setitem__(value, "new", [])
    elif isinstance(value, (list, deque)):
        value.reverse()
        value.append("new")
    elif isinstance(value, set):
        value.add("new")
    elif isinstance(value, bytearray):
        value[1:1] = b"new"


def identities(value: Any) -> list[int]:
    """The containers, in the order in which they lie in each other."""
    if isinstance(value, (dict, list, tuple, deque)):
        inside = value.values() if isinstance(value, dict) else value
        return [id(value), *(found for item in inside for found in identities(item))]
    return [id(value)] if isinstance(value, (set, bytearray)) else []


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.block(x))


class Breaks(Transformation):
    """Does some damage, and fails."""

    def __init__(self, *, damage: Callable[[], object]) -> None:
        self.damage = damage

    def transform(self, graph_module: GraphModule) -> GraphModule:
        self.damage()
        raise ValueError("this far")


def roll_back(gm: GraphModule, damage: Callable[[], object], *, protect_values: bool = False) -> str:
    """Return the error of a pass that has done some damage."""
    with pytest.raises(PassError, match="this far") as caught:
        Breaks(damage=damage)(gm, protect_values=protect_values)
    return str(caught.value)


def holding(value: object) -> Any:
    gm: Any = torch.fx.symbolic_trace(Model())
    gm.held = value
    return gm


HOLDER = holding(None)
values: st.SearchStrategy[Any] = st.recursive(
    st.integers() | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(deque, st.lists(inner, max_size=3))
        | st.builds(bytearray, st.binary(max_size=3))
    ),
)


@given(st.lists(values, max_size=5), st.data())
def test_whatever_lies_in_whatever(drawn: list[Any], data: st.DataObject) -> None:
    drawn.append(data.draw(st.sampled_from(drawn)) if drawn else [])  # one of them twice
    before, text = identities(drawn), repr(drawn)
    HOLDER.held = drawn
    roll_back(HOLDER, lambda: spoil(drawn))
    assert (identities(drawn), repr(drawn)) == (before, text)


def test_cycles_and_shared_ones() -> None:
    shared: list[Any] = [1]
    cycle: dict[str, Any] = {"shared": shared, "again": (shared, [shared])}
    cycle["self"] = cycle
    shared.append(cycle)
    roll_back(holding([cycle, shared, cycle]), lambda: [each.clear() for each in (shared, cycle)])
    assert shared[0] == 1
    assert shared[1] is cycle is cycle["self"]
    assert cycle["again"][0] is cycle["again"][1][0] is shared


def test_tuples_that_share_tuples_take_no_longer_for_it(steps_of: Callable[[Callable[[], object]], int]) -> None:
    value: tuple[Any, ...] = ([],)
    for _ in range(100):
        value = (value, value)
    graph_modules = holding(value), holding([])
    many, few = (steps_of(functools.partial(roll_back, gm, list)) for gm in graph_modules)
    assert many < few + 20_000


def holders(gm: Any) -> list[tuple[dict[str, Any], str]]:
    """The places of a graph module that may hold anything."""
    node = next(iter_nodes(gm.graph))
    return [(node.meta, "mine"), (gm.meta, "mine"), (vars(gm), "mine"), (vars(gm.block), "mine"), (vars(node), "mine")]


@pytest.mark.parametrize("place", range(5), ids=["node.meta", "meta", "attribute", "below", "of a node"])
def test_everything_that_may_hold_anything(place: int) -> None:
    gm: Any = torch.fx.symbolic_trace(Model())
    holder, key = holders(gm)[place]
    holder[key] = value = full_of("leaf")
    before = identities(value)
    for damage in (lambda: spoil(value), lambda: holder.update({key: None}), lambda: holder.pop(key)):
        assert "in place" not in roll_back(gm, damage)
        assert holder[key] is value
        assert value == full_of("leaf")
        assert list(value["ordered"]) == ["first", "second"]
        assert (value["deque"].maxlen, value["default"].default_factory) == (3, list)
        assert identities(value) == before


def test_tensors_deep_in_attributes_are_restored_and_named() -> None:
    gm: Any = torch.fx.symbolic_trace(Model())
    deep, tied = torch.ones(2), gm.block.get_submodule("0").weight
    gm.block.cache = {"keys": [(deep, tied)]}

    def damage() -> None:
        deep.data = torch.zeros(3, dtype=torch.float64)
        gm.block.cache["keys"].clear()

    assert "in place" not in roll_back(gm, damage)
    assert gm.block.cache["keys"][0][0] is deep
    assert gm.block.cache["keys"][0][1] is tied
    assert deep.tolist() == [1.0, 1.0]
    assert "The pass wrote values in place, which a rollback does not restore: block.cache[...]." in roll_back(
        gm, lambda: deep.add_(1)
    )
    assert "in place" not in roll_back(gm, deep.zero_, protect_values=True)
    assert deep.tolist() == [2.0, 2.0]
