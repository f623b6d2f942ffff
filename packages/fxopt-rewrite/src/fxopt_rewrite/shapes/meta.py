"""Descriptions of values in ``node.meta``."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.passes.shape_prop import TensorMetadata

from fxopt_rewrite._torch import no_dispatch

#: Entries of ``node.meta`` that describe the value; never recorded, since they hold tensors.
VALUE_KEYS = ("val", "tensor_meta", "example_value")

#: Held while computing with fake tensors: copies of a graph module share a mode, which is not thread-safe.
ONE_AT_A_TIME = threading.RLock()


def value_entries(node: Node) -> Mapping[str, object]:
    """Return the entries of a node's ``meta`` that describe its value."""
    return {key: node.meta[key] for key in VALUE_KEYS if key in node.meta}


def resized_entries(node: Node, last_dim: int) -> Mapping[str, Any]:
    """Return entries of ``node.meta`` that describe a node's value, made contiguous, with another last dimension.

    >>> node = torch.fx.symbolic_trace(torch.nn.ReLU()).graph.output_node()
    >>> node.meta["val"] = torch.empty(2, 3, device="meta")
    >>> resized_entries(node, 5)["val"].shape
    torch.Size([2, 5])
    """
    entries: dict[str, Any] = {}
    value, described = node.meta.get("val"), node.meta.get("tensor_meta")
    if isinstance(value, Tensor) and value.dim() > 0:
        sizes = (*value.shape[:-1], last_dim)
        if type(value) is FakeTensor and not free_unbacked_symbols(sizes):  # those may be 0, and count as 1 then
            entries["val"] = with_strides(value, strides_in("contiguous", sizes), sizes)
        else:
            with ONE_AT_A_TIME:
                entries["val"] = value.new_empty(sizes)
    if isinstance(described, TensorMetadata) and len(described.shape) > 0:
        sizes = (*described.shape[:-1], last_dim)
        strides = strides_in("contiguous", sizes)
        entries["tensor_meta"] = described._replace(shape=type(described.shape)(sizes), stride=strides)
    return entries


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
        # As in torch, a dimension of size 0 counts as 1.
        step = step * (max(shape[dim], 1) if isinstance(shape[dim], int) else shape[dim])
    return tuple(strides)


def strides_of(value: object) -> tuple[Any, ...] | None:
    """Return the strides of a fake tensor, as expressions; None for anything else."""
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return None
    return tuple(map(expression, value.stride()))


_ELEMENTS: WeakKeyDictionary[FakeTensorMode, dict[Hashable, Tensor]] = WeakKeyDictionary()


def with_strides(value: FakeTensor, strides: Sequence[Any], sizes: Sequence[Any] | None = None) -> FakeTensor:
    """Return a fake tensor like this one, with these strides and, if given, these sizes."""
    sizes = value.shape if sizes is None else sizes
    # torch takes most of a millisecond to make an element of symbolic sizes. Values of one form therefore share one,
    # and with it a storage and a version counter.
    key = value.dtype, *map(expression, (*sizes, *strides))
    with ONE_AT_A_TIME, torch.inference_mode(False), no_dispatch():
        made = _ELEMENTS.setdefault(value.fake_mode, {})
        if key not in made:
            made[key] = torch.empty_strided(tuple(sizes), tuple(strides), dtype=value.dtype, device="meta")
        return FakeTensor(value.fake_mode, made[key].detach(), value.device)


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
