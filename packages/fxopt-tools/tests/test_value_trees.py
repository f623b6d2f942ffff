"""Any value part by part."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from fxopt_tools.value_tree import Above, Container, parts_of, tensors

Point = namedtuple("Point", ["x", "y"])
X = torch.ones(2)


@dataclass
class Record:
    a: object
    b: object = None


@dataclass
class ModelOutput(OrderedDict[str, Any]):
    """As those of transformers: a dictionary of the fields that are given, and a dataclass."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits
        if self.loss is not None:
            self["loss"] = self.loss


class Cache:
    def __init__(self) -> None:
        self.layers = [X, X]
        self.length = 3


class Colour(Enum):
    RED = 1


def paths(value: object) -> list[str]:
    return [path for path, part in parts_of(value, "o").items() if not isinstance(part, Container)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (X, ["o"]),
        (None, ["o"]),
        ((X, [X, 1]), ["o[0]", "o[1][0]", "o[1][1]"]),
        (deque([X]), ["o[0]"]),
        ({"a": X, 3: X, (1, 2): X}, ["o['a']", "o[3]", "o[(1, 2)]"]),
        (OrderedDict(a=X), ["o['a']"]),
        (UserDict(a=X), ["o['a']"]),
        (Point(X, (X,)), ["o.x", "o.y[0]"]),
        (Record(X), ["o.a", "o.b"]),
        (ModelOutput(X), ["o.logits"]),
        (ModelOutput(X, X), ["o.logits", "o.loss"]),
        (Cache(), ["o.layers[0]", "o.layers[1]", "o.length"]),
        (torch.max(torch.eye(2), 0), ["o[0]", "o[1]"]),
        ((), []),
        (torch.Size([2, 3]), ["o"]),
        (Colour.RED, ["o"]),
        (nn.ReLU(), ["o"]),
        (int, ["o"]),
        (len, ["o"]),
        ("text", ["o"]),
        (object(), ["o"]),
    ],
)
def test_paths_read_as_expressions(value: Any, expected: list[str]) -> None:
    assert paths(value) == expected


def kind(value: object) -> str:
    part = parts_of(value, "o")["o"]
    return part.kind if isinstance(part, Container) else "leaf"


def test_kinds_tell_structures_apart() -> None:
    assert kind({}) == kind(OrderedDict()) == kind(UserDict(a=1)) == "dict"
    assert kind([]) == kind(deque()) == "list" and kind(()) == "tuple"
    assert kind(Point(1, 2)) == "Point" and kind(Record(1)) == "Record" and kind(ModelOutput(X)) == "ModelOutput"
    assert parts_of(ModelOutput(X), "o")["o"] == Container("ModelOutput", ModelOutput, 1)


def test_tensors_can_be_replaced() -> None:
    found = tensors(parts_of({"a": X, "b": [1]}, "o", lambda tensor: tensor + 1))
    assert list(found) == ["o['a']"] and found["o['a']"].tolist() == [2, 2]


def test_an_object_inside_itself_is_told_by_how_far_above_it_is() -> None:
    value: list[object] = [X]
    value.append(value)
    assert parts_of(value, "o")["o[1]"] == Above(1)
    cache = Cache()
    cache.layers.append(cache)  # type: ignore[arg-type]  # what no annotation forbids at run time
    assert paths(cache) == ["o.layers[0]", "o.layers[1]", "o.layers[2]", "o.length"]


nested = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


def count(value: object) -> Iterator[object]:
    if isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from count(item)
    else:
        yield value


@given(nested)
def test_every_leaf_has_a_path_of_its_own_that_leads_to_it(value: object) -> None:
    found = [(path, part) for path, part in parts_of(value, "o").items() if not isinstance(part, Container)]
    assert len({path for path, _ in found}) == len(found) == len(list(count(value)))
    assert all(eval(path, {"o": value}) is leaf for path, leaf in found)
