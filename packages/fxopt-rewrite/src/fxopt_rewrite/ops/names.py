"""The name of the operator that a function, method or overload of torch reaches.

``torch.add(x, 1)``, ``x.add(1)`` and ``torch.ops.aten.add.Tensor(x, 1)`` are all ``"add"``, so that the schemas of that
operator hold for each.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node

from fxopt_rewrite.ops.tables import PYTHON_METHODS_OF_THEIR_OWN, PYTHON_OPERATORS


@cache
def aten_overloads(name: str) -> tuple[OpOverload, ...]:
    """Return the overloads of an aten operator that work on tensors; none where there is no such operator.

    >>> [overload._overloadname for overload in aten_overloads("relu")]
    ['default', 'out']
    """
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    return overloads_of(packet) if isinstance(packet, OpOverloadPacket) else ()


def overloads_of(packet: OpOverloadPacket) -> tuple[OpOverload, ...]:
    """Return the overloads of a packet that work on tensors, without TorchScript's on lists and numbers."""
    found: Iterator[OpOverload] = (getattr(packet, name or "default") for name in packet._overload_names)
    return tuple(overload for overload in found if torch._C._dispatch_has_kernel(qualified_name(overload)))


def qualified_name(target: OpOverload | OpOverloadPacket) -> str:
    """Return the full name of an operator, ``"aten::add.Tensor"``."""
    if isinstance(target, OpOverloadPacket):
        return str(target._qualified_op_name)
    schema = target._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


def aten_name(target: OpOverload | OpOverloadPacket) -> str | None:
    """Return the name of an aten operator, ``"add"`` for ``aten.add.Tensor``; None for those of other namespaces."""
    namespace, _, name = qualified_name(target).partition("::")
    return name.partition(".")[0] if namespace == "aten" else None


def functional_name(target: Callable[..., object]) -> str | None:
    """Return the name of a function of ``torch.nn.functional`` that is written in Python; None for any other.

    >>> functional_name(F.softmax), functional_name(torch.softmax)
    ('softmax', None)
    """
    name = getattr(target, "__name__", None)
    if isinstance(target, types.FunctionType) and isinstance(name, str) and getattr(F, name, None) is target:
        return name
    return None


def function_name(target: Callable[..., object]) -> str | None:
    """Return the operator's name for a function of torch that is that operator; None for any other function.

    >>> function_name(torch.add), function_name(torch.linalg.norm), function_name(F.linear), function_name(print)
    ('add', 'linalg_norm', 'linear', None)
    """
    name = getattr(target, "__name__", None)
    if not isinstance(name, str):
        return None
    is_builtin, owner = isinstance(target, types.BuiltinFunctionType), getattr(target, "__self__", None)
    if is_builtin and isinstance(owner, types.ModuleType):
        return name if owner.__name__.startswith("torch._C") else None
    return name if (is_builtin or name in PYTHON_OPERATORS) and getattr(torch, name, None) is target else None


def method_of(target: Callable[..., object]) -> str | None:
    """Return the name of a method that is called as a function, as in ``torch.Tensor.add(x, 1)``; None for others.

    >>> method_of(torch.Tensor.add), method_of(torch.add)
    ('add', None)
    """
    name = getattr(target, "__name__", None)
    if isinstance(name, str) and getattr(torch.Tensor, name, None) is target:
        return name
    return None


@cache
def method_overloads(name: str) -> tuple[OpOverload, ...]:
    """Return the operators that a method of Tensor reaches; none where it has no operator of its own name."""
    if not hasattr(torch.Tensor, name) or name in PYTHON_METHODS_OF_THEIR_OWN:
        return ()
    return aten_overloads(name)


def argument(node: Node, position: int | None, name: str) -> object:
    """Return an argument of a call by position or name, `MISSING` where it is not given."""
    if position is not None and position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, MISSING)


MISSING = object()
"""Stands for an argument that a call does not give."""


def nodes_in(value: object) -> Iterator[Node]:
    """Yield the nodes within an argument, nested in lists, dicts and slices too."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from nodes_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from nodes_in(item)
    elif isinstance(value, slice):
        yield from nodes_in((value.start, value.stop, value.step))
