"""One question for simple passes: does a node call this operation, in whichever form of graph?

``x * y`` is ``operator.mul`` in a traced graph, ``torch.mul`` or the method ``mul`` where the model says so, and
``aten.mul.Tensor`` in a graph of ``torch.export``; ``nn.ReLU``, ``F.relu`` and ``aten.relu.default`` are one, too. A
pass that compares ``node.target`` with one of them finds nothing in the other graphs.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from fxopt_core.graph import check_graph_module, iter_nodes
from fxopt_core.passes.context import note_reading
from fxopt_rewrite.calls.readers import named_arguments
from fxopt_rewrite.effects.modules import is_plain
from fxopt_rewrite.effects.rules import rule_of_function, rule_of_method
from fxopt_rewrite.ops import forms
from fxopt_rewrite.shapes.kinds import Kind

Operation = Callable[..., object]
"""A function of ``operator`` or torch, a method like ``torch.Tensor.mul``, an ATen operator, or a class of modules."""


def calls_of(graph_module: GraphModule, *operations: Operation) -> list[Node]:
    """Return the nodes that call one of these operations in any form, in order.

    See `is_call`. The list does not change with the graph, so that the graph may be edited on the way.

    Raises:
        PreconditionError: It is no graph module.
        TypeError: An operation is no function, or a class of layers that have parameters or settings.

    >>> import torch
    >>> class Product(nn.Module):
    ...     def forward(self, x, y):
    ...         return (x * y).relu()
    >>> traced = torch.fx.symbolic_trace(Product())
    >>> exported = torch.export.export(Product(), (torch.ones(2), torch.ones(2))).module()
    >>> [calls_of(each, operator.mul, nn.ReLU) for each in (traced, exported)]
    [[mul, relu], [mul, relu]]
    """
    check_graph_module(graph_module, "calls_of")
    note_reading(graph_module)
    wanted = [(each, operation_name(each)) for each in operations]
    return [node for node in iter_nodes(graph_module.graph) if _is_one_of(node, graph_module, wanted)]


def is_call(node: Node, *operations: Operation) -> bool:
    """Return whether a node calls one of these operations: as function, method, ATen operator or module.

    Synonyms count (``torch.multiply`` for ``torch.mul``). In-place forms (``mul_``, ``inplace=True``, ``out=``) do not,
    unless they are asked for: they do more. Nor do ``torch.add`` with an ``alpha``, ``torch.div`` with a
    ``rounding_mode``, ``rsub``, whose operands are exchanged, and modules that have hooks. Of modules, activations
    without settings count; read layers by `read_linear` and its like. A function that torch does not have is the same
    as itself alone. Arguments are those of the node: read one or two operands by `operands_of`.

    Raises:
        TypeError: See `calls_of`.

    >>> import torch
    >>> graph = torch.fx.Graph()
    >>> x = graph.placeholder("x")
    >>> tuple(is_call(graph.call_method(name, (x, 2)), operator.mul) for name in ("mul", "mul_"))
    (True, False)
    """
    note_reading(node.graph.owning_module)
    wanted = [(each, operation_name(each)) for each in operations]
    return _is_one_of(node, node.graph.owning_module, wanted)


def operands_of(node: Node) -> tuple[Any, ...]:
    """Return the operands of a call of one or two, in order, whether they are given by position or by name.

    >>> import torch
    >>> graph = torch.fx.Graph()
    >>> x = graph.placeholder("x")
    >>> operands_of(graph.call_function(torch.mul, (), {"other": 2, "input": x}))
    (x, 2)
    """
    found = named_arguments(node, forms.OPERANDS, forms.OPERAND_KEYWORDS)
    return tuple(found[name] for name in forms.OPERANDS if name in found)


def _is_one_of(node: Node, owner: nn.Module | None, wanted: list[tuple[Operation, str | None]]) -> bool:
    name = _called(node, owner)
    return any(
        name == other if other is not None else node.op == "call_function" and node.target is each
        for each, other in wanted
    )


def operation_of(node: Node) -> str | None:
    """Return what all forms of the function or method that a node calls are called; with ``_`` at its end in place."""
    if node.op == "call_function" and callable(node.target):
        return _function_name(node.target)
    return _method_name(str(node.target)) if node.op == "call_method" else None


def _called(node: Node, owner: nn.Module | None) -> str | None:
    """Return the name of the operation that a node calls; None where it is none of torch's, or one with modifiers."""
    if node.op == "call_module":
        return None if owner is None else _called_module(owner.get_submodule(str(node.target)))
    if node.op == "call_function" and callable(node.target):
        name, rule = _function_name(node.target), rule_of_function(node.target)
    elif node.op == "call_method":
        name, rule = _method_name(str(node.target)), rule_of_method(str(node.target))
    else:
        return None
    if name is None or any(node.kwargs.get(key, plain) != plain for key, plain in forms.MODIFIERS.items()):
        return None
    writes = rule.apply(node, lambda _: Kind.UNKNOWN).writes
    return None if writes and not name.endswith("_") else name


def _called_module(module: nn.Module) -> str | None:
    inplace = getattr(module, "inplace", False)
    return None if inplace or not is_plain(module) else forms.ACTIVATIONS.get(type(module))


def operation_name(operation: object) -> str | None:
    """Return what all forms of an operation are called here; None for a function that torch does not have."""
    if isinstance(operation, type) and operation in forms.ACTIVATIONS:
        return forms.ACTIVATIONS[operation]
    if not callable(operation) or isinstance(operation, (nn.Module, type)):
        raise TypeError(
            f"expected an operation, such as operator.mul, torch.mul, torch.nn.functional.relu or torch.nn.ReLU, found "
            f"{operation!r}; layers with parameters or settings are read by read_linear, read_convolution and "
            "read_batch_norm"
        )
    return _function_name(operation)


def _function_name(function: Operation) -> str | None:
    name = str(getattr(function, "__name__", ""))
    if getattr(operator, name, None) is function or getattr(builtins, name, None) is function:
        return forms.OPERATORS.get(name)
    operation = None if getattr(function, "__module__", None) == "math" else rule_of_function(function).operation
    return None if operation is None else forms.SYNONYMS.get(operation, operation)


def _method_name(name: str) -> str | None:
    if name.startswith("__"):
        return forms.OPERATORS.get(str(getattr(getattr(operator, name, None), "__name__", "")))
    operation = rule_of_method(name).operation
    return None if operation is None else forms.SYNONYMS.get(operation, operation)
