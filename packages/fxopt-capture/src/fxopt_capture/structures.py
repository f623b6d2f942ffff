"""Dataclasses within inputs and outputs, which torch's pytrees see into only once they are told to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch.fx import Graph
from torch.fx.graph import _PyTreeCodeGen
from torch.utils import _pytree as pytree


def register_dataclasses(value: object) -> None:
    """Make torch's pytrees see into the dataclasses within `value` that hold tensors, as it does into tuples.

    Registering a class lasts for the process, and changes nothing else about it.
    """
    for leaf in pytree.tree_leaves(value):
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            continue
        fields = [getattr(leaf, field.name) for field in dataclasses.fields(leaf)]
        register_dataclasses(fields)
        if any(isinstance(item, torch.Tensor) for item in pytree.tree_leaves(fields)):
            torch.export.register_dataclass(type(leaf))


def dataclasses_of(graph: Graph) -> tuple[type, ...]:
    """Return the dataclasses that inputs and outputs of a graph consist of, each once.

    >>> dataclasses_of(torch.fx.symbolic_trace(torch.nn.ReLU()).graph)
    ()
    """
    codegen = graph._codegen
    if not isinstance(codegen, _PyTreeCodeGen):
        return ()
    specs = [spec for spec in (codegen.pytree_info.in_spec, codegen.pytree_info.out_spec) if spec is not None]
    return tuple(dict.fromkeys(found for spec in specs for found in _types(spec) if dataclasses.is_dataclass(found)))


def register_again(types: Iterable[type]) -> None:
    """Register dataclasses in a process that may not know them yet."""
    for found in types:
        if found not in pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(found)


def _types(spec: pytree.TreeSpec) -> Iterator[type]:
    if spec.type is not None:
        yield spec.type
    for child in spec.children():
        yield from _types(child)
