"""Reading calls of torch's own operations: which one it is, and with which constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._ops import OpOverload
from torch.fx import Node

UNKNOWN = object()
"""Stands for an argument that the graph computes."""

_HOLDERS = (torch, F, torch._C._nn)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def operation_of(node: Node) -> str | None:
    """Return the name of the operation of torch that a node calls, with its underscore where it works in place.

    >>> graph = torch.fx.Graph()
    >>> value = graph.placeholder("x")
    >>> [operation_of(graph.call_function(f, (value,))) for f in (torch.relu, F.relu, torch.ops.aten.relu_.default, id)]
    ['relu', 'relu', 'relu_', None]
    """
    if node.op == "call_method":
        return str(node.target)
    target: Any = node.target
    if node.op != "call_function":
        return None
    if isinstance(target, OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return name if namespace == "aten" else None
    name = str(getattr(target, "__name__", ""))
    known = any(getattr(holder, name, None) is target for holder in _HOLDERS)
    return name if known or getattr(target, "__module__", None) == "_operator" else None


def settings_of(
    node: Node, value: Node, parameters: Sequence[tuple[str, object]], *, renamed: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """Return the arguments of a call besides its first, by name, with defaults; None where it is called otherwise.

    Args:
        node: the call.
        value: what its first argument has to be.
        parameters: the other parameters in order, with their defaults.
        renamed: other names of parameters.
    """
    names = ("input", *(name for name, _ in parameters))
    if len(node.args) > len(names):
        return None
    found: dict[str, Any] = dict(zip(names, node.args, strict=False))
    for name, given in node.kwargs.items():
        found[{"self": "input", **(renamed or {})}.get(name, name)] = given
    if set(found) - set(names) or found.pop("input", None) is not value:
        return None
    return {name: _constant(found.get(name, default)) for name, default in parameters}


def _constant(given: object) -> object:
    if isinstance(given, list | tuple):
        items = [_constant(item) for item in given]
        return UNKNOWN if UNKNOWN in items else tuple(items)
    return UNKNOWN if isinstance(given, Node) else given


def calls_plainly(module: nn.Module | None, node: Node, value: Node) -> bool:
    """Return whether a node calls a module on a value alone, and the call is its class's ``forward`` and no more."""
    if module is None or "forward" in vars(module) or any(vars(module).get(name) for name in HOOKS):
        return False
    return (node.args == (value,) and not node.kwargs) or (not node.args and dict(node.kwargs) == {"input": value})
