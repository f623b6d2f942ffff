"""The kind of a node's value: a number, sizes, a tensor or unknown, from ``meta`` or else from the call."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from enum import Enum
from functools import cache, reduce

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node
from torch.fx.passes.shape_prop import TensorMetadata

from fxopt_rewrite.ops import names, tables


class Kind(Enum):
    """What kind of value a node has."""

    NUMBER = "a Python number"
    SIZES = "a tuple of numbers"
    PLAIN = "a Python value that holds no memory, as a dtype"
    TENSOR = "a tensor"
    TENSORS = "a list or tuple of tensors"
    UNKNOWN = "unknown"


#: Kinds of values that hold no tensor.
MEMORY_FREE = frozenset({Kind.NUMBER, Kind.SIZES, Kind.PLAIN})

#: Returns the kind of an operand.
Known = Callable[[Node], Kind]

_NUMBER_TYPES = (int, float, complex, SymInt, SymFloat, SymBool)
_CASTS = tables.words("bfloat16 bool byte cdouble cfloat char cpu cuda double float half int long short")
_NUMBER_METHODS = tables.PURE_METHODS - tables.words("dim_order new_tensor storage_type tolist unique")
_METHODS_OF_NUMBERS = frozenset({"__int__", "__float__", "__index__", "__bool__", "__len__", "numel", "count", "index"})
_KINDS_OF_ATTRIBUTES = {
    **dict.fromkeys(tables.PURE_ATTRIBUTES, Kind.NUMBER),
    **dict.fromkeys(("dtype", "device", "layout", "name", "names"), Kind.PLAIN),
    "shape": Kind.SIZES,
}
_TENSOR_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
_ARITHMETIC = tables.ARITHMETIC | tables.INPLACE_OPERATORS | {"pos", "round"}
_PREDICATES = frozenset({"contains", "index", "is_", "is_not", "not_", "truth", "length_hint"})


def _kind_of_value(value: object) -> Kind | None:
    if isinstance(value, Tensor):
        return Kind.TENSOR
    if isinstance(value, _NUMBER_TYPES):
        return Kind.NUMBER
    if isinstance(value, (str, torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return Kind.PLAIN
    if isinstance(value, (tuple, list)) and value:
        kinds = {_kind_of_value(item) for item in value}
        if kinds == {Kind.NUMBER}:
            return Kind.SIZES
        return Kind.TENSORS if kinds == {Kind.TENSOR} else None
    return None


def kind_of_node(node: Node, known: Known, graph_module: GraphModule | None = None) -> Kind:
    """Return the kind of a node's value; ``known`` returns the kinds of its operands."""
    noted = _kind_of_value(node.meta.get("val"))
    if noted is not None:
        return noted
    if "val" not in node.meta and isinstance(node.meta.get("tensor_meta"), TensorMetadata):
        return Kind.TENSOR
    if node.op == "placeholder":
        return _kind_of_annotation(node.type)
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


_NUMBER_NAMES = tables.words("int float bool complex")
_HOLDERS = tables.words("tuple list Tuple List Sequence")


def _kind_of_annotation(annotation: object) -> Kind:
    """Return the kind of an input that is annotated as a number, perhaps or None, or as a tuple or list of numbers."""
    names_in_it = set(re.findall(r"\w+", str(annotation))) - tables.words("class typing Optional Union None NoneType")
    others = names_in_it - _NUMBER_NAMES
    if others == names_in_it or not others <= _HOLDERS:
        return Kind.UNKNOWN
    return Kind.SIZES if others else Kind.NUMBER


def attribute(root: object, target: str) -> object:
    """Return what a dotted target names within a module; None if there is nothing."""
    return reduce(lambda value, name: getattr(value, name, None), target.split("."), root)


def _kind_of_module(node: Node, module: object, known: Known) -> Kind:
    cls = type(module)
    if cls in tables.ALIASING_MODULES:
        return _kind_of_first(node, known)
    if cls not in tables.FRESH_MODULES:
        return Kind.UNKNOWN
    says_tensor = cls.forward.__annotations__.get("return") in (Tensor, "Tensor")  # others may return tuples
    return Kind.TENSOR if says_tensor or not getattr(module, "return_indices", True) else Kind.UNKNOWN


def _kind_of_subject(node: Node, known: Known) -> Kind:
    """Return the kind of the value whose method, item or attribute a call asks for."""
    return known(node.args[0]) if node.args and isinstance(node.args[0], Node) else Kind.UNKNOWN


def _kind_of_first(node: Node, known: Known) -> Kind:
    return next((known(operand) for operand in names.nodes_in((node.args, node.kwargs))), Kind.UNKNOWN)


def _kind_of_method(node: Node, name: str, known: Known) -> Kind:
    if _kind_of_subject(node, known) in MEMORY_FREE:
        return Kind.NUMBER if name in _METHODS_OF_NUMBERS else Kind.UNKNOWN
    if name in {"size", "stride"}:
        return Kind.NUMBER if len(node.args) > 1 or node.kwargs else Kind.SIZES
    if name in _NUMBER_METHODS:
        return Kind.NUMBER
    if name == "tolist":
        return Kind.SIZES
    if name == "__getitem__":
        return _kind_of_item(node, known)
    return Kind.TENSOR if name in _CASTS or name == "new_tensor" else _returned(names.method_overloads(name))


def _kind_of_function(node: Node, target: Callable[..., object], known: Known) -> Kind:
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return _returned(names.overloads_of(target))
    source, name = names.source_of(target)
    if source in ("operator", "builtins"):
        return _kind_of_python(node, name, known)
    if source == "math" or (source == "torch" and name.startswith("sym_")):
        return Kind.NUMBER
    if source == "functional":
        return _kind_of_functional(node, name, known)
    if source == "method":
        return _kind_of_method(node, name, known)
    if target is torch.tensor:
        return Kind.TENSOR
    return _returned(names.aten_overloads(name)) if source == "aten" else Kind.UNKNOWN


def _kind_of_functional(node: Node, name: str, known: Known) -> Kind:
    if name in tables.DROPOUTS:
        return _kind_of_first(node, known)
    if "max_pool" in name or name == "multi_head_attention_forward":  # which may return tuples
        return Kind.TENSOR if node.kwargs.get("return_indices") is False and len(node.args) <= 2 else Kind.UNKNOWN
    return Kind.TENSOR if name in tables.FRESH_FUNCTIONALS else Kind.UNKNOWN


def _kind_of_python(node: Node, name: str, known: Known) -> Kind:
    if name == "getitem":
        return _kind_of_item(node, known)
    if name == "getattr":
        return _kind_of_attribute(node, known)
    if name in {"len", "int", "float", "bool"} | _PREDICATES:
        return Kind.NUMBER
    if name in {"tuple", "list", "sorted", "sum", "max", "min"} and _kind_of_first(node, known) is Kind.SIZES:
        return Kind.SIZES if name in {"tuple", "list", "sorted"} else Kind.NUMBER
    if name in _ARITHMETIC or name in {"max", "min", "divmod"}:
        found = _kind_of_arithmetic(node, name, known)
        return Kind.SIZES if found is Kind.NUMBER and name == "divmod" else found
    return Kind.PLAIN if name in {"str", "type", "isinstance"} else Kind.UNKNOWN


def _kind_of_arithmetic(node: Node, name: str, known: Known) -> Kind:
    kinds = {known(operand) for operand in names.nodes_in((node.args, node.kwargs))}
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
    given = _kind_of_subject(node, known)
    index = node.args[1] if len(node.args) > 1 else None
    if given is Kind.TENSOR:
        return Kind.TENSOR
    if given in {Kind.SIZES, Kind.TENSORS}:
        if isinstance(index, slice):
            return given
        return Kind.NUMBER if given is Kind.SIZES else Kind.TENSOR
    return Kind.UNKNOWN


def _kind_of_attribute(node: Node, known: Known) -> Kind:
    given = _kind_of_subject(node, known)
    name = node.args[1] if len(node.args) > 1 else None
    if given not in {Kind.TENSOR, Kind.UNKNOWN}:
        return Kind.UNKNOWN
    return given if name in _TENSOR_ATTRIBUTES else _KINDS_OF_ATTRIBUTES.get(str(name), Kind.UNKNOWN)


@cache
def _returned(overloads: tuple[OpOverload, ...]) -> Kind:
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


#: How many nodes are visited before a value counts as unknown.
_BUDGET = 500


def kind_of(node: Node, found: dict[Node, Kind] | None = None, graph_module: GraphModule | None = None) -> Kind:
    """Return the kind of a node's value, looking back through the graph as far as necessary.

    ``found`` is a cache of known kinds; without it, the number of visits is bounded.
    """
    kinds: dict[Node, Kind] = {} if found is None else found
    missing: list[Node] = []

    def known(operand: Node) -> Kind:
        if operand not in kinds:
            missing.append(operand)
        return kinds.get(operand, Kind.UNKNOWN)

    # A stack of our own, since recursion would end at chains of a thousand nodes.
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
