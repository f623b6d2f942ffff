"""Passes are equal exactly if their signatures are: whatever their class looks like, and whatever they did since."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch.fx import GraphModule

from fxopt_core import (
    Transformation,
    compose,
    iter_nodes,
)


class Base(Transformation):
    """It does nothing but count."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in iter_nodes(graph_module.graph):
            self.mark_as_transformed(node)
        return graph_module


@dataclass
class Data(Base):
    size: int = 2
    names: tuple[str, ...] = ()

    def transform(self, graph_module: GraphModule) -> GraphModule:
        self.size += 1
        return super().transform(graph_module)


@dataclass(frozen=True)
class Frozen(Base):
    size: int = 2
    names: tuple[str, ...] = ()


@dataclass(order=True)
class Ordered(Base):
    size: int = 2


@dataclass(slots=True)
class Slotted(Base):
    size: int = 2


@dataclass
class Config:
    size: int = 2


class Mixed(Config, Base):
    """A dataclass as a mixin, whose equality would come first."""


@dataclass
class Derived(Data):
    more: float = 0.5


T = TypeVar("T")


@dataclass
class OfType(Base, Generic[T]):
    size: int = 2


class Counting(Base):
    """Its counter, its list and its tensor stand under the names of options."""

    def __init__(self, *, rounds: int = 0, seen: list[Any] | None = None, size: Any = 1) -> None:
        self.seen = [] if seen is None else seen
        self.size = size
        self.rounds = rounds

    def transform(self, graph_module: GraphModule) -> GraphModule:
        self.rounds += 1
        self.seen.append(self.rounds)
        self.size = torch.zeros(2)
        self.new = object()
        return super().transform(graph_module)


class Normalises(Base):
    """It stores something else than it was given."""

    def __init__(self, names: Any = (), *, where: str = "*") -> None:
        self.names = tuple(names)
        self.where = re.compile(where.replace("*", ".*"))


def traced() -> GraphModule:
    return torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU()))


class TestDataclasses:
    @pytest.mark.parametrize("cls", [Data, Frozen, Ordered, Slotted, Mixed, Derived, OfType, OfType[int]])
    def test_equality_and_hash_follow_the_signature(self, cls: Any) -> None:
        assert cls() == cls(size=2)
        assert hash(cls()) == hash(cls(size=2))
        assert cls().signature == cls(size=2).signature
        for size in (3, 2.0, True, None):
            assert cls(size=size) != cls()
            assert cls(size=size).signature != cls().signature
        assert len({cls(), cls(), cls(size=3)}) == 2

    def test_frozen_ones_stay_frozen(self) -> None:
        with pytest.raises(FrozenInstanceError):
            Frozen().size = 3  # type: ignore[misc]  # that is the test

    def test_defaults_made_anew_are_refused(self) -> None:
        @dataclass
        class Anew(Base):
            names: list[str] = field(default_factory=list)

        with pytest.raises(TypeError, match=r"option 'names' of .*Anew has no value that is the same in every process"):
            _ = Anew().signature
        assert Anew(["a"]) == Anew(["a"])

    @pytest.mark.parametrize("made", [Data(3), Frozen(3), Derived(3, more=1.0), Mixed(3), Slotted(3)])
    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
    def test_copies_are_equal(self, made: Any, copied: Callable[[Any], Any]) -> None:
        twin = copied(made)
        assert (twin, twin.signature, twin.size) == (made, made.signature, 3)


class TestWhileRunning:
    def test_what_a_pass_stores_counts_for_nothing(self) -> None:
        given = Counting(size=3)
        before, shown = given.signature, repr(given)
        for _ in range(2):
            given(traced())
        compose(given, given)(traced())
        assert (given.rounds, given.seen) == (4, [1, 2, 3, 4])
        assert (given.signature, repr(given)) == (before, shown)
        assert given == Counting(size=3)
        assert dict(given.options) == {"rounds": 0, "seen": None, "size": 3}

    def test_nor_what_it_appends_to_a_list_it_was_given(self) -> None:
        listed: list[Any] = [[0]]
        given = Counting(seen=listed)
        given(traced())
        assert listed == [[0], 1]
        assert given == Counting(seen=[[0]])
        assert given.options["seen"] == [[0]]

    def test_a_copy_made_afterwards_is_equal(self) -> None:
        given = Counting()
        given(traced())
        twin = pickle.loads(pickle.dumps(given))
        assert (twin, twin.rounds) == (given, 1)


class TestNormalised:
    def test_an_equal_pass_can_be_made_of_the_options(self) -> None:
        given = Normalises(["a"], where="layer.*")
        assert given.options["names"] == ["a"]
        assert given.options["where"] == "layer.*"
        options: dict[str, Any] = dict(given.options)
        assert Normalises(**options) == given


class TestReading:
    @pytest.mark.parametrize(
        "made", [Counting(seen=[1]), Data(), Frozen(), Mixed(), Normalises(), compose(Data(), Data())]
    )
    def test_changes_nothing(self, made: Transformation) -> None:
        before, keys = pickle.dumps(vars(made)), list(vars(made))
        assert made.signature == made.signature
        assert isinstance(made.uuid(), str)
        assert made == made  # reading, too
        assert isinstance(hash(made), int)
        assert dict(made.options) == dict(made.options)
        assert (pickle.dumps(vars(made)), list(vars(made))) == (before, keys)


class TestKept:
    def test_containers_are_copied_and_the_rest_is_not(self) -> None:
        tensor = torch.zeros(1)
        given: dict[str, Any] = {"a": [1, (2, [tensor])], "b": {3}}
        now: Any = Counting(size=given).options["size"]
        given["a"][1][1].append(4)
        given["b"].add(5)
        assert now == {"a": [1, (2, [tensor])], "b": {3}}
        assert now["a"][1][1][0] is tensor
        assert Counting(size=[torch.Size([1])]) != Counting(size=[(1,)])
