"""Chains of views, transposes and slices, as strided readings of one value, before and after attention.

A model splits the last dimension of a product into heads in many ways: three slices, each viewed and transposed; one
view with five dimensions, permuted and unbound; repeated keys. All of them are compared as strided readings of one
value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

from torch import SymInt
from torch.fx import Node

from fxopt_rewrite import GraphIndex, Operation, read_operation, same_size, tensor_facts

Size = int | SymInt


@dataclass(frozen=True)
class Axis:
    """A dimension of a value, as a reading of its base.

    Attributes:
        size: its size.
        dim: the dimension of the base that it is; None for a part of the base's last one.
        stride: how far apart its elements are in the base's last dimension; 0 for a repetition.
        repeat: how many times in succession each element comes.
    """

    size: Size
    dim: int | None = None
    stride: int = 0
    repeat: int = 1

    def __eq__(self, other: object) -> bool:
        """Return whether two axes are known to be equal, without adding a guard on sizes."""
        if not isinstance(other, Axis):
            return NotImplemented
        same = (self.dim, self.stride, self.repeat) == (other.dim, other.stride, other.repeat)
        return same and same_size(self.size, other.size)


@dataclass(frozen=True, eq=False)
class Layout:
    """A value as a reading of another one, its base.

    Attributes:
        base: the other value.
        axes: its dimensions.
        offset: where it begins in the base's last dimension.
        chain: the nodes between, the last first.
    """

    base: Node
    axes: tuple[Axis, ...]
    offset: int = 0
    chain: tuple[Node, ...] = ()


def whole(base: Node) -> Layout | None:
    """Return a value as a reading of itself; None where its shape is unknown."""
    facts = tensor_facts(base)
    if facts is None or facts.rank < 2 or not isinstance(facts.shape[-1], int):
        return None
    *before, last = facts.shape
    return Layout(base, (*(Axis(size, dim) for dim, size in enumerate(before)), Axis(last, None, 1)))


def layout_of(index: GraphIndex, node: Node) -> Layout | None:
    """Return a value as a reading of the first one in its chain of views, or of itself."""
    chain: list[Node] = []
    while (source := source_of(index, node)) is not None:
        chain.append(node)
        node = source
    layout = whole(node)
    while layout is not None and chain:
        node = chain.pop()
        layout = step(index, layout, node) or whole(node)  # or else it is the base of what follows
    return layout


def source_of(index: GraphIndex, node: Node) -> Node | None:
    """Return the value that a node reorders or takes a part of; None for other nodes."""
    call = read_operation(index, node)
    if call is None or operation(index, node) not in STEPS or call.input is None:
        return None
    if call.name == "getitem" and operation(index, call.input) in SPLITS:
        call = read_operation(index, call.input)
    return None if call is None else call.input


def operation(index: GraphIndex, node: Node) -> str:
    """Return the name of the function of torch that a node calls; "" for anything else and for in-place forms."""
    call = read_operation(index, node)
    return "" if call is None or call.module is not None or call.inplace else call.name


def step(index: GraphIndex, layout: Layout, node: Node) -> Layout | None:
    """Return what a node makes of a value; None where that is not a reading of the same base."""
    call = read_operation(index, node)
    if call is None:
        return None
    try:
        axes, offset = STEPS[call.name](index, layout, call)
    except (_NoReadingError, KeyError):
        return None
    split = [] if call.input is None or operation(index, call.input) not in SPLITS else [call.input]
    return Layout(layout.base, axes, offset, (node, *split, *layout.chain))


class _NoReadingError(Exception):
    """A step is not a strided reading, or its arguments are computed."""


_Made = tuple[tuple[Axis, ...], int]


def _number(call: Operation, name: str) -> int:
    value = call.arguments.get(name)
    if type(value) is not int:
        raise _NoReadingError
    return value


def _same(index: GraphIndex, layout: Layout, call: Operation) -> _Made:
    return layout.axes, layout.offset


def _transpose(index: GraphIndex, layout: Layout, call: Operation) -> _Made:
    order = list(layout.axes)
    one, other = _number(call, "dim0"), _number(call, "dim1")
    order[one], order[other] = order[other], order[one]
    return tuple(order), layout.offset


def _permute(index: GraphIndex, layout: Layout, call: Operation) -> _Made:
    dims = call.arguments.get("dims")
    if not isinstance(dims, tuple) or not all(type(dim) is int for dim in dims):
        raise _NoReadingError
    return tuple(layout.axes[dim] for dim in dims), layout.offset


def _narrow(index: GraphIndex, layout: Layout, call: Operation) -> _Made:
    start, length = _number(call, "start"), _number(call, "length")
    if start < 0:
        raise _NoReadingError
    return _at(layout, _number(call, "dim"), slice(start, start + length))


def _slice(index: GraphIndex, layout: Layout, call: Operation) -> _Made:
    return _at(layout, _number(call, "dim"), slice(*(call.arguments[key] for key in ("start", "end", "step"))))


def _getitem(index: GraphIndex, layout: Layout, call: Operation) -> _Made:
    place = call.arguments["index"]
    split = None if call.input is None else read_operation(index, call.input)
    if split is None or split.name not in SPLITS:
        return _indexed(layout, *(place if isinstance(place, tuple) else (place,)))
    if type(place) is not int or place < 0:
        raise _NoReadingError
    dim, name = _number(split, "dim"), split.name
    if name == "unbind":
        return _at(layout, dim, place)
    sizes = split.arguments["chunks" if name == "chunk" else "split_size_or_sections"]
    size = layout.axes[dim].size
    if type(size) is int and type(sizes) is int:
        each = -(-size // sizes) if name == "chunk" else sizes
        return _at(layout, dim, slice(place * each, (place + 1) * each))
    if not isinstance(sizes, list | tuple) or not all(type(part) is int for part in sizes):
        raise _NoReadingError
    return _at(layout, dim, slice(sum(sizes[:place]), sum(sizes[: place + 1])))


def _at(layout: Layout, dim: int, place: int | slice | None) -> _Made:
    """Return what an index at one dimension gives; None adds a dimension there."""
    whole = [slice(None)] * (dim % (len(layout.axes) + (place is None)))
    return _indexed(layout, *whole, place)


def _indexed(layout: Layout, *places: Any) -> _Made:
    """Return what an index of numbers, slices and new dimensions gives."""
    waiting, made, offset = list(layout.axes), list[Axis](), layout.offset
    for place in places:
        if place is None or place == slice(None):
            made.append(Axis(1) if place is None else waiting.pop(0))
            continue
        axis = waiting.pop(0)
        size: Any = axis.size
        one = type(place) is int
        part = slice(place % size, place % size + 1) if one else place
        # Offsets count elements of the base's last dimension, so only its parts can start elsewhere.
        fits = isinstance(part, slice) and part.step in (None, 1) and axis.dim is None and axis.repeat == 1
        if not fits or any(type(each) not in (int, NoneType) for each in (size, part.start, part.stop)):
            raise _NoReadingError
        start, stop, _ = part.indices(size)
        offset += start * axis.stride
        made += [] if one else [replace(axis, size=max(stop - start, 0))]
    return (*made, *waiting), offset


def _expand(index: GraphIndex, layout: Layout, call: Operation) -> _Made:
    shape = _shape_of(call.node)
    if len(shape) != len(layout.axes):
        raise _NoReadingError
    axes = list(layout.axes)
    for dim, size in enumerate(shape):
        if same_size(size, axes[dim].size):
            continue
        if axes[dim] != Axis(1) or type(size) is not int:
            raise _NoReadingError
        axes[dim] = Axis(size)
    return tuple(axes), layout.offset


def _shape_of(node: Node) -> tuple[Size, ...]:
    facts = tensor_facts(node)
    if facts is None:
        raise _NoReadingError
    return facts.shape


def _view(index: GraphIndex, layout: Layout, call: Operation) -> _Made:
    """Split and join dimensions, one after the other."""
    if "dtype" in call.arguments:
        raise _NoReadingError
    shape = _shape_of(call.node)
    waiting, made = list(layout.axes), list[Axis]()
    for size in shape:
        while len(waiting) > 1 and waiting[0] == Axis(1) and not same_size(size, 1):
            waiting.pop(0)
        axis = waiting.pop(0) if waiting else Axis(1)
        while not same_size(axis.size, size):
            divides = type(axis.size) is int and type(size) is int and size > 0 and axis.size % size == 0
            if divides and axis.dim is None and axis.repeat == 1:
                rest: Any = axis.size
                made.append(replace(axis, size=size, stride=axis.stride * (rest // size)))
                waiting.insert(0, replace(axis, size=rest // size))
                break
            if not waiting:
                raise _NoReadingError
            axis = _joined(axis, waiting.pop(0))
        else:
            made.append(axis)
    if any(axis != Axis(1) for axis in waiting):
        raise _NoReadingError
    return tuple(made), layout.offset


def _joined(one: Axis, other: Axis) -> Axis:
    """Return two neighbouring dimensions as one."""
    if type(other.size) is not int or type(one.size) is not int:
        raise _NoReadingError
    if one == Axis(1):
        return other
    if other == Axis(1):
        return one
    size = one.size * other.size
    # (heads, repeats) -> heads, each repeated in succession: keys and values of grouped heads
    if other.dim is None and not other.stride and one.repeat == 1:
        return replace(one, size=size, repeat=other.size)
    parts = one.dim is None and other.dim is None and one.repeat == other.repeat == 1
    if parts and one.stride == other.stride * other.size:
        return Axis(size, None, other.stride)
    raise _NoReadingError


CASTS = frozenset({"to", "_to_copy", "float", "type_as"})
SPLITS = frozenset({"split", "chunk", "unbind"})
STEPS: dict[str, Callable[[GraphIndex, Layout, Operation], _Made]] = {
    **dict.fromkeys(("clone", "contiguous", "alias"), _same),
    "transpose": _transpose,
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten"), _view),
    "permute": _permute,
    "narrow": _narrow,
    "slice": _slice,
    "select": lambda index, layout, call: _at(layout, _number(call, "dim"), _number(call, "index")),
    "getitem": _getitem,
    "unsqueeze": lambda index, layout, call: _at(layout, _number(call, "dim"), None),
    "expand": _expand,
}


def heads(axes: Sequence[Axis]) -> tuple[int, int, int] | None:
    """Return heads, size and repetition of a value (batch, heads, rows, size) of a base (batch, rows, features).

    >>> heads((Axis(1, 0), Axis(12, None, 32), Axis(5, 1), Axis(32, None, 1)))
    (12, 32, 1)
    """
    if len(axes) != 4 or axes[0].dim != 0 or axes[2].dim != 1 or type(axes[1].size) is not int:
        return None
    if any(axis.repeat != 1 for axis in (axes[0], axes[2], axes[3])):
        return None
    count, size = axes[1], axes[3]
    if count.dim is not None or size.dim is not None or size.stride != 1 or type(size.size) is not int:
        return None
    if count.size > 1 and count.stride != size.size:
        return None
    return (count.size // count.repeat, size.size, count.repeat)
