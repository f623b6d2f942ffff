"""Dataclasses and caches within inputs and outputs, which have to be registered with torch's pytrees."""

from __future__ import annotations

import builtins
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree as pytree

from fxopt_capture._torch import drop_pytree_info, pytree_info, set_name, set_pytree_info
from fxopt_capture.call.caches import is_cache, is_cache_type, register_cache_type


def register_structures(value: object) -> None:
    """Register the classes of caches, and of dataclasses with tensors, within `value` with torch's pytrees.

    A registration lasts for the process, and changes nothing else about the class.
    """
    for leaf in pytree.tree_leaves(value):
        # An instance of a registered class is a container to pytrees, so no class comes here twice.
        if is_cache(leaf):
            register_cache_type(type(leaf))
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            continue
        fields = [getattr(leaf, field.name) for field in dataclasses.fields(leaf)]
        register_structures(fields)
        if any(isinstance(item, torch.Tensor) for item in pytree.tree_leaves(fields)):
            torch.export.register_dataclass(type(leaf))


# ``torch.export`` runs graph modules node by node, where lists and dictionaries are those of ``torch.fx``.
_RETURNED: dict[Any, Any] = {immutable_list: list, immutable_dict: dict}


def return_plain_containers(graph: Graph) -> None:
    """Let a graph return plain containers in place of immutable ones."""
    info = pytree_info(graph)
    if info is not None and info.out_spec is not None:
        set_pytree_info(graph, info.orig_args, info.in_spec, _plain(info.out_spec))


def name_inputs(graph: Graph) -> None:
    """Let the generated ``forward`` take its inputs and return its outputs without pytrees, if they are plain.

    torch.export uses pytrees for them, at several microseconds a call. Inputs that are tensors by name, and outputs
    that are a tensor or tuples of tensors, need none; the code then reads like a traced ``forward``.
    """
    info = pytree_info(graph)
    if info is None or info.out_spec is None or not _only_tuples(info.out_spec):
        return
    by_position, by_name = info.in_spec.children()
    if by_position.num_children or not all(child.is_leaf() for child in by_name.children()):
        return
    for node, name in zip(graph.find_nodes(op="placeholder"), by_name.context, strict=True):
        node.target = name
    output = graph.output_node()
    leaves: Any = output.args[0]
    output.args = (pytree.tree_unflatten(leaves, info.out_spec),)
    drop_pytree_info(graph)


def separate_names(graph: Graph) -> None:
    """Rename the nodes of inputs whose values would overwrite other arguments of the generated ``forward``.

    The node of an argument with the name of a builtin function is written with a number, ``input_1 = input``, even if
    there is an argument ``input_1`` that is read only afterwards.
    """
    placeholders = graph.find_nodes(op="placeholder")
    taken = {str(node.target) for node in placeholders}
    for node in placeholders:
        name = str(node.target)
        if hasattr(builtins, name) and any(other.startswith(f"{name}_") for other in taken):
            set_name(node, free_name(f"{name}_value", taken))


def free_name(name: str, taken: Collection[str]) -> str:
    """Return a name, with as many underscores at its end as it takes to be none of those taken.

    >>> free_name("x", ["x", "x_"])
    'x__'
    """
    while name in taken:
        name += "_"
    return name


def inputs_by_name(graph: Graph, leaves: Sequence[object]) -> dict[str, Any]:
    """Return the inputs of a graph by name, each in its containers, from its flat ones."""
    if (info := pytree_info(graph)) is None:
        return {str(node.target): leaf for node, leaf in zip(graph.find_nodes(op="placeholder"), leaves, strict=True)}
    args, kwargs = pytree.tree_unflatten(leaves, info.in_spec)
    return {**dict(zip(info.orig_args, args, strict=False)), **kwargs}


def _only_tuples(spec: pytree.TreeSpec) -> bool:
    return spec.is_leaf() or (spec.type is tuple and all(map(_only_tuples, spec.children())))


def _plain(spec: pytree.TreeSpec) -> pytree.TreeSpec:
    children = [_plain(child) for child in spec.children()]
    kind = _RETURNED.get(spec.type, spec.type)
    same = kind is spec.type and all(new is old for new, old in zip(children, spec.children(), strict=True))
    return spec if same else pytree.TreeSpec(kind, spec.context, children)


def structures_of(graph: Graph) -> tuple[type, ...]:
    """Return the dataclasses and caches that inputs and outputs of a graph consist of, each once.

    >>> structures_of(torch.fx.symbolic_trace(torch.nn.ReLU()).graph)
    ()
    """
    info = pytree_info(graph)
    if info is None:
        return ()
    specs = [spec for spec in (info.in_spec, info.out_spec) if spec is not None]
    found = dict.fromkeys(kind for spec in specs for kind in _types(spec))
    return tuple(kind for kind in found if dataclasses.is_dataclass(kind) or is_cache_type(kind))


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
