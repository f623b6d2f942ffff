"""What kind of value a node has: a number, sizes, a tensor, or not known, by ``meta`` or else by what made it."""

from __future__ import annotations

import builtins
import math
import operator
import sys
from collections.abc import Callable
from enum import Enum
from functools import cache

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node
from torch.fx.passes.shape_prop import TensorMetadata

from fxopt_core import effect_tables as tables
from fxopt_core.torch_calls import (
    aten_overloads,
    function_name,
    functional_name,
    method_of,
    method_overloads,
    nodes_in,
    overloads_of,
)


class Kind(Enum):
    """What kind of value a node has."""

    NUMBER = "a Python number"
    SIZES = "a tuple of numbers"
    PLAIN = "a Python value that holds no memory, as a dtype"
    TENSOR = "a tensor"
    TENSORS = "a list or tuple of tensors"
    UNKNOWN = "unknown"


MEMORY_FREE = frozenset({Kind.NUMBER, Kind.SIZES, Kind.PLAIN})
"""Kinds that hold no tensor."""

Known = Callable[[Node], Kind]
"""Tells the kind of an operand."""

_NUMBER_TYPES = (int, float, complex, SymInt, SymFloat, SymBool)
_CASTS = tables.names("bfloat16 bool byte cdouble cfloat char cpu cuda double float half int long short")
_NUMBER_METHODS = tables.PURE_METHODS - tables.names(
    "is_contiguous new_tensor tolist unique size stride dim_order storage_type"
)
_NUMBER_ATTRIBUTES = tables.PURE_ATTRIBUTES - {"shape", "dtype", "device", "layout", "name", "names"}
_PLAIN_ATTRIBUTES = frozenset({"dtype", "device", "layout", "name", "names"})
_TENSOR_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
_ARITHMETIC = tables.names(
    """
    abs add and_ eq floordiv ge gt iadd iand ifloordiv ilshift imod imul inv invert ior ipow irshift isub itruediv
    ixor le lshift lt matmul mod mul ne neg or_ pos pow rshift sub truediv xor round
    """
)
_PREDICATES = frozenset({"contains", "index", "is_", "is_not", "not_", "truth", "length_hint"})


def kind_by_meta(node: Node) -> Kind | None:
    """Return the kind that ``node.meta`` tells; None where it tells nothing."""
    if "val" in node.meta:
        return _kind_of_value(node.meta["val"])
    if isinstance(node.meta.get("tensor_meta"), TensorMetadata):
        return Kind.TENSOR
    return None


def _kind_of_value(value: object) -> Kind | None:
    if isinstance(value, Tensor):
        return Kind.TENSOR
    if isinstance(value, _NUMBER_TYPES):
        return Kind.NUMBER
    if isinstance(value, (str, torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return Kind.PLAIN
    if isinstance(value, (tuple, list)) and value:
        kinds = {_kind_of_value(item) for item in value}
        return (
            {Kind.NUMBER: Kind.SIZES, Kind.TENSOR: Kind.TENSORS}.get(kinds.pop() or Kind.UNKNOWN)
            if len(kinds) == 1
            else None
        )
    return None


def kind_of_node(node: Node, known: Known, graph_module: GraphModule | None = None) -> Kind:
    """Return the kind of a node's value.

    Args:
        node: the node.
        known: tells the kinds of the nodes that it takes.
        graph_module: where its modules and attributes are; the graph's owner if not given.
    """
    told = kind_by_meta(node)
    if told is not None:
        return told
    root = graph_module if graph_module is not None else node.graph.owning_module
    if node.op == "call_function" and callable(node.target):
        return _kind_of_function(node, node.target, known)
    if node.op == "call_method":
        return _kind_of_method(node, str(node.target), known)
    if root is None:
        return Kind.UNKNOWN
    if node.op == "get_attr":
        return _kind_of_value(attribute(root, str(node.target))) or Kind.UNKNOWN
    return _kind_of_module(node, attribute(root, str(node.target)), known) if node.op == "call_module" else Kind.UNKNOWN


def attribute(root: nn.Module, target: str) -> object:
    """Return what a dotted target names within a module, None where nothing is there."""
    value: object = root
    for name in target.split("."):
        value = getattr(value, name, None)
    return value


def _kind_of_module(node: Node, module: object, known: Known) -> Kind:
    if type(module) in tables.FRESH_MODULES - tables.TUPLE_MODULES:
        return Kind.TENSOR
    if type(module) in tables.ALIASING_MODULES:
        return next((known(operand) for operand in nodes_in((node.args, node.kwargs))), Kind.UNKNOWN)
    if (
        "Pool" in type(module).__name__
        and type(module) in tables.TUPLE_MODULES
        and not getattr(module, "return_indices", True)
    ):
        return Kind.TENSOR
    return Kind.UNKNOWN


def _kind_of_method(node: Node, name: str, known: Known) -> Kind:
    given = known(node.args[0]) if node.args and isinstance(node.args[0], Node) else Kind.UNKNOWN
    if given in MEMORY_FREE:
        return Kind.NUMBER if name in {"__int__", "__float__", "__index__", "__bool__", "__len__"} else Kind.UNKNOWN
    if name in {"size", "stride"}:
        return Kind.NUMBER if len(node.args) > 1 or node.kwargs else Kind.SIZES
    if name in _NUMBER_METHODS:
        return Kind.NUMBER
    if name == "__getitem__":
        return _kind_of_item(node, known)
    return Kind.TENSOR if name in _CASTS or name == "new_tensor" else _returned(method_overloads(name))


def _kind_of_function(node: Node, target: Callable[..., object], known: Known) -> Kind:
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return _returned((target,) if isinstance(target, OpOverload) else overloads_of(target))
    name = str(getattr(target, "__name__", ""))
    if getattr(operator, name, None) is target or getattr(builtins, name, None) is target:
        return _kind_of_python(node, name, known)
    if getattr(math, name, None) is target or (name.startswith("sym_") and getattr(torch, name, None) is target):
        return Kind.NUMBER
    if functional_name(target) is not None:
        return _kind_of_functional(node, name, known)
    method = method_of(target)
    if method is not None:
        return _kind_of_method(node, method, known)
    return Kind.TENSOR if target is torch.tensor else _returned_by_name(function_name(target))


def _kind_of_functional(node: Node, name: str, known: Known) -> Kind:
    if name in tables.DROPOUTS:
        return next((known(operand) for operand in nodes_in((node.args, node.kwargs))), Kind.UNKNOWN)
    if name in tables.SEVERAL_RESULTS:
        return Kind.TENSOR if node.kwargs.get("return_indices") is False and len(node.args) <= 2 else Kind.UNKNOWN
    return Kind.TENSOR if name in tables.FRESH_FUNCTIONALS else Kind.UNKNOWN


def _kind_of_python(node: Node, name: str, known: Known) -> Kind:
    if name == "getitem":
        return _kind_of_item(node, known)
    if name == "getattr":
        return _kind_of_attribute(node, known)
    if name in {"len", "int", "float", "bool"} | _PREDICATES:
        return Kind.NUMBER
    if name in _ARITHMETIC or name in {"max", "min"}:
        return _kind_of_arithmetic(node, name, known)
    return Kind.PLAIN if name in {"str", "type", "isinstance"} else Kind.UNKNOWN


def _kind_of_arithmetic(node: Node, name: str, known: Known) -> Kind:
    kinds = {known(operand) for operand in nodes_in((node.args, node.kwargs))}
    if Kind.TENSOR in kinds and name not in {"max", "min"}:
        return Kind.TENSOR
    if Kind.SIZES in kinds:
        holds_sizes = name in {"add", "mul", "iadd", "imul"} and kinds <= {Kind.SIZES, Kind.NUMBER}
        return Kind.SIZES if holds_sizes and _are_numbers(node.args) else Kind.UNKNOWN
    if kinds == {Kind.NUMBER} and all(isinstance(arg, (Node, *_NUMBER_TYPES)) for arg in node.args):
        return Kind.NUMBER
    return Kind.UNKNOWN


def _are_numbers(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_are_numbers(item) for item in value)
    return isinstance(value, (Node, *_NUMBER_TYPES))


def _kind_of_item(node: Node, known: Known) -> Kind:
    given = known(node.args[0]) if node.args and isinstance(node.args[0], Node) else Kind.UNKNOWN
    index = node.args[1] if len(node.args) > 1 else None
    if given is Kind.TENSOR:
        return Kind.TENSOR
    if given in {Kind.SIZES, Kind.TENSORS}:
        if isinstance(index, slice):
            return given
        return Kind.NUMBER if given is Kind.SIZES else Kind.TENSOR
    return Kind.UNKNOWN


def _kind_of_attribute(node: Node, known: Known) -> Kind:
    given = known(node.args[0]) if node.args and isinstance(node.args[0], Node) else Kind.UNKNOWN
    name = node.args[1] if len(node.args) > 1 else None
    if given not in {Kind.TENSOR, Kind.UNKNOWN}:
        return Kind.UNKNOWN
    if name == "shape":
        return Kind.SIZES
    if name in _NUMBER_ATTRIBUTES:
        return Kind.NUMBER
    if name in _PLAIN_ATTRIBUTES:
        return Kind.PLAIN
    return given if name in _TENSOR_ATTRIBUTES else Kind.UNKNOWN


@cache
def _returned_by_name(name: str | None) -> Kind:
    return _returned(aten_overloads(name)) if name is not None else Kind.UNKNOWN


@cache
def _returned(overloads: tuple[OpOverload, ...]) -> Kind:
    """Return the kind of what operators return, if their schemas agree."""
    kinds = {_returned_by_schema(overload) for overload in overloads}
    return kinds.pop() if len(kinds) == 1 else Kind.UNKNOWN


def _returned_by_schema(overload: OpOverload) -> Kind:
    types = [str(result.type) for result in overload._schema.returns]
    if types == ["Tensor"]:
        return Kind.TENSOR
    if types and all(name in {"Tensor", "List[Tensor]"} for name in types):
        return Kind.TENSORS
    if types in (["List[int]"], ["List[SymInt]"]):
        return Kind.SIZES
    return Kind.NUMBER if types and types[0] in {"int", "SymInt", "float", "bool", "number", "Scalar"} else Kind.UNKNOWN


_BUDGET = 500
"""How many nodes are looked at before a value counts as unknown."""


def kind_of(node: Node, found: dict[Node, Kind] | None = None, graph_module: GraphModule | None = None) -> Kind:
    """Return the kind of a node's value, looking back through the graph as far as that takes.

    Args:
        node: the node.
        found: kinds that are known already, to which those found are added; without it, looking back has bounds.
        graph_module: where modules and attributes are; the graph's owner if not given.
    """
    kinds: dict[Node, Kind] = {} if found is None else found
    missing: list[Node] = []

    def known(operand: Node) -> Kind:
        if operand not in kinds:
            missing.append(operand)
        return kinds.get(operand, Kind.UNKNOWN)

    waiting = [node]
    for _ in range(_BUDGET if found is None else sys.maxsize):
        current = waiting[-1]
        missing.clear()
        kind = kind_of_node(current, known, graph_module)
        if kind is Kind.UNKNOWN and missing:
            waiting.append(missing[-1])
            continue
        kinds[current] = kind
        waiting.pop()
        if not waiting:
            return kind
    return Kind.UNKNOWN
