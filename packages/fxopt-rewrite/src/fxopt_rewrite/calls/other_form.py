"""What a pass without sites overlooked: operations that it looks for, in a form that it does not know.

A pass that compares ``node.target`` with ``operator.mul`` finds nothing in a graph of ``torch.export``, which calls
``aten.mul.Tensor``. Whether this is why it did nothing can be read off its code: what is compared there, and not called
or inserted, are the operations that it looks for.
"""

from __future__ import annotations

import dis
import inspect
import operator
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node

from fxopt_core.ledger.records import Refusal
from fxopt_core.passes.record import EXPLAINERS
from fxopt_rewrite.calls.any_form import calls_of, operation_name

_COMPARING = {"IS_OP", "COMPARE_OP", "CONTAINS_OP"}
_COLLECTING = {"BUILD_TUPLE", "BUILD_LIST", "BUILD_SET", "COPY", "SWAP", "DUP_TOP", "ROT_TWO", "LOAD_CONST"}


def overlooked(transformation: object, graph_module: GraphModule) -> list[Refusal]:
    """Return a refusal for each operation that a pass looks for in one form and that the graph has in another alone."""
    try:
        return list(_overlooked(transformation, graph_module))
    except Exception:  # names of a stranger's program may mean anything, and this is not worth an error
        return []


EXPLAINERS.append(overlooked)


def _overlooked(transformation: object, graph_module: GraphModule) -> Iterator[Refusal]:
    wanted: dict[str, list[Any]] = {}
    for each in _compared_in(_code_of(transformation), transformation):
        name = operation_name(each) if _is_operation(each) else None
        if name is not None:
            wanted.setdefault(name, []).append(each)
    for forms in wanted.values():
        nodes = calls_of(graph_module, forms[0])
        found = [_form_of(node, graph_module) for node in nodes]
        if nodes and not any(form in forms for form in found):
            message = (
                f"node `{nodes[0].name}` calls `{_text(found[0])}`, and the pass looks for `{_text(forms[0])}`, the "
                f"same in another form of graph: find both by fxopt_rewrite.calls_of(graph_module, {_text(forms[0])})"
            )
            yield Refusal(nodes[0].name, "other-form", message, tuple(node.name for node in nodes))


def _is_operation(value: object) -> bool:
    return callable(value) and (not isinstance(value, type) or value.__module__.startswith("torch.nn.modules.activ"))


def _form_of(node: Node, graph_module: GraphModule) -> Any:
    """Return what a node calls: a function, the name of a method, or the class of a module."""
    return type(graph_module.get_submodule(str(node.target))) if node.op == "call_module" else node.target


def _text(form: Any) -> str:
    """Return what a form is called in a program."""
    if isinstance(form, (str, OpOverload, OpOverloadPacket)):
        return str(form)
    name = form.__name__
    owners = {"operator": operator, "torch": torch, "torch.nn.functional": F, "torch.nn": nn, "Tensor": torch.Tensor}
    return next((f"{owner}.{name}" for owner, each in owners.items() if getattr(each, name, None) is form), name)


def _code_of(transformation: object) -> list[FunctionType]:
    """Return the function with which a pass begins, if it is a user's own; none for a `SitePass`."""
    wrapped = getattr(transformation, "_function", None) or getattr(transformation, "_torch_pass", None)
    start = inspect.unwrap(wrapped or type(transformation).transform)  # type: ignore[attr-defined]  # it is a pass
    return [start] if isinstance(start, FunctionType) and not str(start.__module__).startswith("fxopt_") else []


def _compared_in(functions: list[FunctionType], owner: object) -> Iterator[object]:
    """Yield what functions compare something with, and so do those of the same module that they use."""
    seen = set(functions)
    while functions:
        function = functions.pop()
        for code in _with_inner(function.__code__):
            lookup = _Lookup(function, owner)
            yield from _compared(code, lookup)
            for name in code.co_names:
                for used in (lookup.of_module(name), lookup.of_owner(name)):
                    if isinstance(used, FunctionType) and used.__globals__ is function.__globals__ and used not in seen:
                        seen.add(used)
                        functions.append(used)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


class _Lookup:
    """What names mean in a function: those that can be looked up without running it."""

    def __init__(self, function: FunctionType, owner: object) -> None:
        self._globals, self._owner = function.__globals__, owner

    def of_module(self, name: str) -> object:
        return self._globals.get(name)

    def of_owner(self, name: str) -> object:
        found = inspect.getattr_static(self._owner, name, None)
        return found.__func__ if isinstance(found, (staticmethod, classmethod)) else found

    def attribute(self, value: object, name: str) -> object:
        if value is self:
            return self.of_owner(name)
        if isinstance(value, (ModuleType, type, OpOverloadPacket)):
            return getattr(value, name, None)
        return value if isinstance(value, dict) else None  # `targets.get(node.target)`


def _compared(code: CodeType, lookup: _Lookup) -> Iterator[object]:
    """Yield the operands of comparisons that are names; containers of functions stand for what is in them."""
    operands: list[object] = []
    for each in dis.get_instructions(code):
        name = each.opname
        if name in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            operands.append(lookup.of_module(each.argval))
        elif name.startswith("LOAD_FAST"):
            last = each.argval[-1] if isinstance(each.argval, tuple) else each.argval
            operands.append(lookup if last == "self" else None)
        elif name in ("LOAD_ATTR", "LOAD_METHOD") and operands:
            operands[-1] = lookup.attribute(operands[-1], each.argval)
        elif name in _COMPARING:
            yield from _leaves(operands)
            operands = []
        elif name not in _COLLECTING:
            yield from _leaves(value for value in operands if isinstance(value, (dict, set, frozenset)))
            operands = []


def _leaves(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, (dict, set, frozenset, list, tuple)):
            yield from value
        else:
            yield value
