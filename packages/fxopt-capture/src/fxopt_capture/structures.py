"""Dataclasses and caches within inputs and outputs, which torch's pytrees see into only once they are told to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch.fx import Graph
from torch.fx.graph import _PyTreeCodeGen
from torch.utils import _pytree as pytree

from .caches import is_cache, is_cache_type, register_cache_type


def register_structures(value: object) -> None:
    """Make torch's pytrees see into the caches and dataclasses with tensors within `value`, as it does into tuples.

    Registering a class lasts for the process, and changes nothing else about it.
    """
    for leaf in pytree.tree_leaves(value):
        if is_cache(leaf):
            register_cache_type(type(leaf))
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            continue
        fields = [getattr(leaf, field.name) for field in dataclasses.fields(leaf)]
        register_structures(fields)
        if any(isinstance(item, torch.Tensor) for item in pytree.tree_leaves(fields)):
            torch.export.register_dataclass(type(leaf))


class Size:
    """Stands for ``torch.Size`` where a graph says how its outputs nest: torch's pytrees make a tuple of that."""


def return_sizes(graph: Graph) -> None:
    """Let a graph return a ``torch.Size`` where the model does."""
    codegen = graph._codegen
    if isinstance(codegen, _PyTreeCodeGen) and codegen.pytree_info.out_spec is not None:
        codegen.pytree_info = codegen.pytree_info._replace(out_spec=_with_sizes(codegen.pytree_info.out_spec))


def _with_sizes(spec: pytree.TreeSpec) -> pytree.TreeSpec:
    children = [_with_sizes(child) for child in spec.children()]
    kind = Size if spec.type is torch.Size else spec.type
    same = kind is spec.type and all(new is old for new, old in zip(children, spec.children(), strict=True))
    return spec if same else pytree.TreeSpec(kind, spec.context, children)


def structures_of(graph: Graph) -> tuple[type, ...]:
    """Return the dataclasses and caches that inputs and outputs of a graph consist of, each once.

    >>> structures_of(torch.fx.symbolic_trace(torch.nn.ReLU()).graph)
    ()
    """
    codegen = graph._codegen
    if not isinstance(codegen, _PyTreeCodeGen):
        return ()
    specs = [spec for spec in (codegen.pytree_info.in_spec, codegen.pytree_info.out_spec) if spec is not None]
    return tuple(dict.fromkeys(found for spec in specs for found in _types(spec) if _is_registered_here(found)))


def _is_registered_here(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or is_cache_type(kind)


def register_again(types: Iterable[type]) -> None:
    """Register dataclasses and caches in a process that may not know them yet."""
    for found in types:
        if is_cache_type(found):
            register_cache_type(found)
        elif found not in pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(found)


def _types(spec: pytree.TreeSpec) -> Iterator[type]:
    if spec.type is not None:
        yield spec.type
    for child in spec.children():
        yield from _types(child)


pytree.register_pytree_node(
    Size, lambda size: ([], None), lambda items, context: torch.Size(items), serialized_type_name="fxopt_capture.Size"
)
