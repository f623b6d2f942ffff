"""A captured graph module takes containers that nest as at capture, and refuses all others."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxopt_capture import capture
from fxopt_capture.call.nesting import check_nesting, nesting_of
from fxopt_capture.call.structures import register_structures
from fxopt_core.errors import CaptureError


class Point(NamedTuple):
    """A named tuple."""

    first: Tensor
    second: Tensor


class Place(NamedTuple):
    """Another named tuple of the same size."""

    first: Tensor
    second: Tensor


@dataclasses.dataclass
class Optional:
    """A dataclass of which one field may be missing."""

    first: Tensor
    second: Tensor | None = None


class Total(nn.Module):
    """Computes with all tensors in a container, and with their number."""

    def forward(self, x: Tensor, values: Any) -> Tensor:
        leaves = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
        return x * len(leaves) + sum(leaves)


X = torch.ones(3, 2)


def one() -> Tensor:
    """Return a tensor; not the same one twice, as torch.export would take them for one."""
    return torch.ones(())


REFUSED: dict[str, tuple[Callable[[], object], Callable[[], object], str]] = {
    "more": (lambda: [one()], lambda: [one(), one()], "`values` of the captured Total is a list of 2, .* a list of 1"),
    "empty": (lambda: (one(),), tuple, "is a tuple of 0, where it was captured with a tuple of 1"),
    "keys": (lambda: {"a": one()}, lambda: {"a": one(), "b": one()}, r"is a dict with the keys \['a', 'b'\], where"),
    "other key": (lambda: {"a": one()}, lambda: {"b": one()}, r"keys \['b'\], .* keys \['a'\]"),
    "nested": (
        lambda: [[one()], 1],
        lambda: [[one(), one()], 1],
        r"`values\[0\]` of the captured Total is a list of 2",
    ),
    "leaf": (
        lambda: [one()],
        lambda: [[one()]],
        r"`values\[0\]` .* is a list of 1, .* captured with a tensor or const",
    ),
    "tensor": (
        lambda: [one()],
        lambda: torch.ones(1),
        "is a tensor or constant, where it was captured with a list of 1",
    ),
    "plain": (one, lambda: [one()], "`values` .* is a list of 1, where it was captured with a tensor"),
    "field": (lambda: Optional(one()), lambda: Optional(one(), one()), "Optional of 2, where"),
    "named": (lambda: Point(one(), one()), lambda: Place(one(), one()), "is a Place of 2, .* with a Point"),
    "list as tuple": (lambda: (one(),), lambda: [one()], "is a list of 1, where it was captured with a tuple of 1"),
    "named as tuple": (lambda: (one(), one()), lambda: Point(one(), one()), "is a Point of 2, .* a tuple of 2"),
    "order": (
        lambda: {"a": one(), "b": one()},
        lambda: {"b": one(), "a": one()},
        r"keys \['b', 'a'\], .* \['a', 'b'\]",
    ),
    "view": (lambda: {"a": one()}, lambda: MappingProxyType({"a": one()}), "is a tensor or constant, where"),
    "in named": (lambda: Point([one()], one()), lambda: Point([one()] * 2, one()), r"`values\[0\]` .* list of 2"),  # type: ignore[arg-type]  # a list on purpose
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_nesting_is_refused(name: str) -> None:
    captured_with, called_with, message = REFUSED[name]
    register_structures([captured_with()])  # as capture does
    nesting = nesting_of(captured_with())
    check_nesting(captured_with(), nesting, "values", "Total")
    with pytest.raises(CaptureError, match=message):
        check_nesting(called_with(), nesting, "values", "Total")


def test_containers_of_every_kind_are_taken_and_checked() -> None:
    def values(second: Tensor | None = None) -> list[Any]:
        kinds = {"a": one(), "b": (OrderedDict(c=one()), Point(one(), one()), Optional(one(), second))}
        return [[one()], 1, kinds]

    captured = capture(Total().eval(), (X, values()))
    assert torch.equal(captured(X, values()), Total()(X, values()))
    message = r"`values\[2\]\['b'\]\[2\]` of the captured Total is an Optional of 2, where"
    for args, kwargs in (((X, values(one())), {}), ((), {"values": values(one()), "x": X})):
        with pytest.raises(CaptureError, match=message):
            captured(*args, **kwargs)
    with pytest.raises(CaptureError, match=r"`values\[1\]` is 2"):
        captured(X, [values()[0], 2, values()[2]])


VALUES = st.recursive(
    st.integers() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner)
        | st.dictionaries(st.sampled_from("abc"), inner).map(OrderedDict)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(VALUES, VALUES)
def test_what_is_accepted_has_the_structure_of_the_capture(value: object, other: object) -> None:
    try:
        check_nesting(other, nesting_of(value), "x", "Model")
    except CaptureError:
        assert pytree.tree_structure(other) != pytree.tree_structure(value)
    else:
        assert pytree.tree_structure(other) == pytree.tree_structure(value)
