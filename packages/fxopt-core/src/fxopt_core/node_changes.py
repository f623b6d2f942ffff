"""What a node is, to tell afterwards which nodes foreign code made or changed."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

Held: TypeAlias = "tuple[nn.Module | None, tuple[tuple[str, object], ...]]"
"""A module that a node calls, and the tensors that the node gets from the graph module, by name."""

NodePicture: TypeAlias = "tuple[object, Held]"
"""Operation, target and arguments of a node, and what it takes from the graph module."""


def node_picture(graph_module: GraphModule, node: Node) -> NodePicture:
    """Return all that a node is, with names in place of other nodes, and what the module that it calls holds."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda other: f"%{other.name}")
    return (node.op, node.target, args, kwargs), _held(graph_module, node)


def _held(graph_module: GraphModule, node: Node) -> Held:
    if node.op not in ("call_module", "get_attr"):
        return None, ()
    path, _, attribute = str(node.target).rpartition(".")
    try:
        owner = graph_module.get_submodule(str(node.target) if node.op == "call_module" else path)
    except AttributeError:  # a broken graph, which the check at the end of the run reports
        return None, ()
    if node.op == "get_attr":
        return None, ((attribute, getattr(owner, attribute, None)),)
    return owner, (*owner.named_parameters(), *owner.named_buffers())


def is_unchanged(before: NodePicture | None, after: NodePicture, same_module: bool) -> bool:
    """Return whether a node is as it was, and what it calls; of a copied graph module, equal values are the same."""
    if before is None or not _same(before[0], after[0]):
        return False
    (module, tensors), (new_module, new_tensors) = before[1], after[1]
    if [name for name, _ in tensors] != [name for name, _ in new_tensors]:
        return False
    pairs = [(value, new) for (_, value), (_, new) in zip(tensors, new_tensors, strict=True)]
    if same_module:
        return module is new_module and all(value is new for value, new in pairs)
    return type(module) is type(new_module) and all(_equal(value, new) for value, new in pairs)


def _equal(value: object, new: object) -> bool:
    """Return whether two tensors hold the same; without values to compare, they count as far as one can see."""
    if not (isinstance(value, Tensor) and isinstance(new, Tensor)):
        return value is new or type(value) is type(new)
    if (value.dtype, value.shape, value.device, type(value)) != (new.dtype, new.shape, new.device, type(new)):
        return False
    return value.is_meta or type(value) not in (Tensor, nn.Parameter) or torch.equal(value, new)


def _same(left: Any, right: Any) -> bool:
    """Return whether two arguments are equal, type and all: 1 is not 1.0."""
    if left is right or type(left) is not type(right):
        return left is right
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    try:
        return bool(left == right)
    except Exception:  # what compares to a tensor, or not at all
        return False
