"""Descriptions of values in ``node.meta``: moved from node to node, and resized."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import SymInt, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.passes.shape_prop import TensorMetadata
from torch.utils._mode_utils import no_dispatch

from fxopt_core.graph import iter_nodes

VALUE_KEYS = ("val", "tensor_meta", "example_value")
"""Entries of ``node.meta`` that describe the value; never recorded, since they hold tensors."""


ONE_AT_A_TIME = threading.RLock()
"""Held while fake tensors are computed with: copies of a graph module share a mode, which is for one thread alone."""


def value_entries(node: Node) -> Mapping[str, object]:
    """Return the entries of a node's ``meta`` that describe its value."""
    return {key: node.meta[key] for key in VALUE_KEYS if key in node.meta}


class Resized:
    """Descriptions of values with another size of their last dimension, contiguous.

    Of values that are alike, the first one is worked out, and the others go by it: torch takes a tenth of a millisecond
    for each tensor of symbolic sizes that it makes. Such tensors share their memory, which is none.

    >>> node = torch.fx.symbolic_trace(nn.ReLU()).graph.output_node()
    >>> node.meta["val"] = torch.empty(2, 3, device="meta")
    >>> Resized().entries(node, 5)["val"].shape
    torch.Size([2, 5])
    """

    def __init__(self) -> None:
        self._elements: dict[Hashable, Tensor] = {}
        self._strides: dict[Hashable, tuple[int, ...]] = {}

    def entries(self, node: Node, last_dim: int) -> Mapping[str, Any]:
        """Return entries of ``node.meta`` that describe a node's value with this size of its last dimension."""
        entries: dict[str, Any] = {}
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dim() > 0:
            shape = (*value.shape[:-1], last_dim)
            with ONE_AT_A_TIME:
                entries["val"] = self._empty(value, shape)
        described = node.meta.get("tensor_meta")
        if isinstance(described, TensorMetadata) and len(described.shape) > 0:
            sizes = (*described.shape[:-1], last_dim)
            with ONE_AT_A_TIME:
                strides = self._strides_of(sizes, getattr(value, "fake_mode", None))
            entries["tensor_meta"] = described._replace(shape=type(described.shape)(sizes), stride=strides)
        return entries

    def _empty(self, value: Tensor, shape: tuple[int | SymInt, ...]) -> Tensor:
        """Return a tensor without data, of another shape; what a fake one does itself takes four times as long."""
        if type(value) is Tensor:
            return torch.empty(shape, dtype=value.dtype, device="meta")
        if type(value) is not FakeTensor:
            return value.new_empty(shape, device=value.device)
        key = (id(value.fake_mode), value.dtype, tuple(map(expression, shape)))
        with no_dispatch():
            if key not in self._elements:
                self._elements[key] = torch.empty(shape, dtype=value.dtype, device="meta")
            element = self._elements[key].detach()
        return FakeTensor(value.fake_mode, element, value.device)

    def _strides_of(self, sizes: tuple[int, ...], mode: object) -> tuple[int, ...]:
        key = (id(mode), tuple(map(expression, sizes)))
        if key not in self._strides:
            step, strides = 1, list[int]()
            for size in reversed(sizes):
                strides.append(step)
                step *= size
            self._strides[key] = tuple(reversed(strides))
        return self._strides[key]


def expression(size: int | SymInt) -> Hashable:
    """Return what is equal for sizes that are known to be the same, without adding a guard."""
    if not isinstance(size, SymInt):
        return size
    found: Hashable = getattr(size.node, "expr", None)
    return size.node if found is None else found


def describe_attributes(graph_module: GraphModule, nodes: Iterable[Node]) -> None:
    """Describe the tensors that ``get_attr`` nodes stand for, where the other nodes describe theirs by fake tensors."""
    values = [node.meta.get("val") for node in iter_nodes(graph_module.graph)]
    fakes = [value for value in values if isinstance(value, FakeTensor)]
    with_gradients = any(fake.requires_grad for fake in fakes)
    for node in nodes if fakes else ():
        owner, _, key = str(node.target).rpartition(".")
        tensor = getattr(graph_module.get_submodule(owner), key, None)
        if isinstance(tensor, Tensor) and type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta:
            with ONE_AT_A_TIME:
                described = fakes[0].fake_mode.from_tensor(tensor.detach(), static_shapes=True)
                node.meta["val"] = described.requires_grad_(tensor.requires_grad and with_gradients)
