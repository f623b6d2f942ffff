"""Descriptions of values in ``node.meta``."""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.passes.shape_prop import TensorMetadata

from fxopt_rewrite._torch import no_dispatch

VALUE_KEYS = ("val", "tensor_meta", "example_value")
"""Entries of ``node.meta`` that describe the value; never recorded, since they hold tensors."""

ONE_AT_A_TIME = threading.RLock()
"""Held while computing with fake tensors: copies of a graph module share a mode, which is not thread-safe."""


def value_entries(node: Node) -> Mapping[str, object]:
    """Return the entries of a node's ``meta`` that describe its value."""
    return {key: node.meta[key] for key in VALUE_KEYS if key in node.meta}


class Resized:
    """Descriptions of contiguous values with another size of the last dimension.

    Each is made once for a shape: torch takes most of a millisecond to make a fake tensor of symbolic sizes.

    >>> node = torch.fx.symbolic_trace(torch.nn.ReLU()).graph.output_node()
    >>> node.meta["val"] = torch.empty(2, 3, device="meta")
    >>> Resized().entries(node, 5)["val"].shape
    torch.Size([2, 5])
    """

    def __init__(self) -> None:
        self._elements: dict[Hashable, Tensor] = {}

    def entries(self, node: Node, last_dim: int) -> Mapping[str, Any]:
        """Return entries of ``node.meta`` that describe a node's value with this size of its last dimension."""
        entries: dict[str, Any] = {}
        value, described = node.meta.get("val"), node.meta.get("tensor_meta")
        with ONE_AT_A_TIME:
            if isinstance(value, Tensor) and value.dim() > 0:
                entries["val"] = self._empty(value, (*value.shape[:-1], last_dim))
            if isinstance(described, TensorMetadata) and len(described.shape) > 0:
                sizes = (*described.shape[:-1], last_dim)
                if "val" in entries:
                    strides = tuple(entries["val"].stride())
                else:
                    strides = tuple(math.prod(sizes[place:]) for place in range(1, len(sizes) + 1))
                entries["tensor_meta"] = described._replace(shape=type(described.shape)(sizes), stride=strides)
        return entries

    def _empty(self, value: Tensor, shape: tuple[int | SymInt, ...]) -> Tensor:
        if type(value) is Tensor:
            return torch.empty(shape, dtype=value.dtype, device="meta")
        if type(value) is not FakeTensor:
            return value.new_empty(shape, device=value.device)
        key = (id(value.fake_mode), value.dtype, tuple(map(expression, shape)))
        with no_dispatch():
            if key not in self._elements:
                self._elements[key] = torch.empty(shape, dtype=value.dtype, device="meta")
            element = self._elements[key].detach()  # ``value.new_empty`` would take many times as long
        return FakeTensor(value.fake_mode, element, value.device)


_ORDERS = {"contiguous": (0, 1, 2, 3), "channels_last": (0, 2, 3, 1)}


def strides_in(memory_format: str, shape: Sequence[Any]) -> tuple[Any, ...]:
    """Return the strides of a dense tensor: of any rank if "contiguous", of four dimensions if "channels_last".

    >>> strides_in("channels_last", (2, 3, 8, 8))
    (192, 1, 24, 3)
    """
    order = _ORDERS[memory_format] if len(shape) == 4 else range(len(shape))
    strides: list[Any] = [1] * len(shape)
    step: Any = 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * (max(shape[dim], 1) if isinstance(shape[dim], int) else shape[dim])
    return tuple(strides)


def strides_of(value: object) -> tuple[Any, ...] | None:
    """Return the strides of a fake tensor, as expressions; None for anything else."""
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return None
    return tuple(map(expression, value.stride()))


def memory_format_of(value: object) -> str | None:
    """Return "contiguous" for a value whose strides are exactly these, "channels_last" for such an image, else None."""
    strides = strides_of(value)
    if strides is None or not isinstance(value, FakeTensor):
        return None
    shape = tuple(map(expression, value.shape))  # whose products are found faster than those of symbolic sizes
    formats = _ORDERS if len(shape) == 4 else ("contiguous",)
    return next((each for each in formats if strides_in(each, shape) == strides), None)


def in_memory_format(value: FakeTensor, memory_format: str) -> FakeTensor:
    """Return a fake tensor like this one, with the strides of a memory format: no operator runs."""
    with no_dispatch():
        strides = strides_in(memory_format, value.shape)
        element = torch.empty_strided(tuple(value.shape), strides, dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, element, value.device)


def alias_of_fake(value: FakeTensor) -> FakeTensor:
    """Return another fake tensor over the same memory: ``value.detach()`` takes a hundred times as long."""
    with no_dispatch():
        element = value.detach()
    return FakeTensor(value.fake_mode, element, value.device, constant=value.constant)


def expression(size: int | SymInt) -> Hashable:
    """Return a key that is equal for sizes that are known to be equal, without adding a guard."""
    if not isinstance(size, SymInt):
        return size
    found: Hashable = getattr(size.node, "expr", None)
    return size.node if found is None else found
