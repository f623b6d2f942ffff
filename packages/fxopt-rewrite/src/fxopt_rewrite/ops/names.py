"""The name of the operator that a function, method or overload of torch reaches.

``torch.add(x, 1)``, ``x.add(1)`` and ``torch.ops.aten.add.Tensor(x, 1)`` are all ``"add"``, so that the schemas of that
operator hold for each.
"""

from __future__ import annotations

import builtins
import math
import operator
import types
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node
from torch.fx.node import map_arg

from fxopt_rewrite._torch import has_kernel
from fxopt_rewrite.ops.tables import PURE_TORCH_FUNCTIONS, PYTHON_METHODS_OF_THEIR_OWN


@cache
def aten_overloads(name: str) -> tuple[OpOverload, ...]:
    """Return the overloads of an aten operator that work on tensors; none if there is no such operator.

    >>> [overload._overloadname for overload in aten_overloads("relu")]
    ['default', 'out']
    """
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    return overloads_of(packet) if isinstance(packet, OpOverloadPacket) else ()


def overloads_of(target: OpOverload | OpOverloadPacket) -> tuple[OpOverload, ...]:
    """Return an overload, or those of a packet that work on tensors, without TorchScript's on lists and numbers."""
    if isinstance(target, OpOverload):
        return (target,)
    found: Iterator[OpOverload] = (getattr(target, name or "default") for name in target._overload_names)
    return tuple(overload for overload in found if has_kernel(qualified_name(overload)))


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


def source_of(target: object) -> tuple[str, str]:
    """Return where a function comes from, and its name there; two empty texts for one that is not torch's or Python's.

    The source is ``operator``, ``math``, ``builtins``, ``functional`` (written in Python), ``method`` (of ``Tensor``,
    called as a function), ``aten`` (torch's function for an operator) or ``torch`` (any other function of torch).

    >>> [source_of(each) for each in (F.softmax, torch.softmax, torch.Tensor.add, abs)]
    [('functional', 'softmax'), ('aten', 'softmax'), ('method', 'add'), ('builtins', 'abs')]
    """
    name = getattr(target, "__name__", None)
    if not isinstance(name, str):
        return "", ""
    for module in (operator, math, builtins):
        if getattr(module, name, None) is target:
            return module.__name__.strip("_"), name
    if isinstance(target, types.FunctionType) and getattr(F, name, None) is target:
        return "functional", name
    if getattr(torch.Tensor, name, None) is target:
        return "method", name
    is_builtin, owner = isinstance(target, types.BuiltinFunctionType), getattr(target, "__self__", None)
    wraps = isinstance(target, types.FunctionType) and name not in PURE_TORCH_FUNCTIONS  # Python around the operator
    own = getattr(torch, name, None) is target
    known = own and (is_builtin or wraps)
    # `F.linear` and `F.gelu` are functions of `torch._C._nn`, and not in `torch`.
    if is_builtin and isinstance(owner, types.ModuleType):
        known = owner.__name__.startswith("torch._C")
    if known and aten_overloads(name):
        return "aten", name
    return ("torch", name) if own else ("", "")


@cache
def method_overloads(name: str) -> tuple[OpOverload, ...]:
    """Return the operators that a method of Tensor reaches; none if no operator has its name."""
    if not hasattr(torch.Tensor, name) or name in PYTHON_METHODS_OF_THEIR_OWN:
        return ()
    return aten_overloads(name)


def argument(node: Node, position: int | None, name: str) -> object:
    """Return an argument of a call by position or name, `MISSING` where it is not given."""
    if position is not None and position < len(node.args):
        return node.args[position]
    if not node.kwargs or name in node.kwargs:  # most calls: this runs for every node
        return node.kwargs.get(name, MISSING)
    known = "input" if name == "self" else name  # an operator's ``self`` is a function's ``input``
    return next((value for key, value in node.kwargs.items() if NUMPY.get(key, key) == known), MISSING)


#: NumPy's names of arguments, which torch's functions and methods also take: ``torch.cat(tensors, axis=1)``.
NUMPY = {"axis": "dim", "keepdims": "keepdim", "a": "input", "x": "input", "x1": "input", "x2": "other"}

#: Stands for an argument that a call does not give.
MISSING = object()


def nodes_in(value: Any) -> list[Node]:
    """Return the nodes within an argument, nested in lists, dicts and slices too."""
    found: list[Node] = []
    map_arg(value, found.append)
    return found
