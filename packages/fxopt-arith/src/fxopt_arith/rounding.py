"""Which values are rounded, compared or cast to integers later, so that their last bit matters."""

from __future__ import annotations

import operator
import types
from collections.abc import Iterator

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node

from fxopt_arith import rounding_names as names
from fxopt_rewrite import GraphIndex, is_python_number, tensor_facts

_CALLS = ("call_function", "call_method", "call_module")
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


class RoundedValues:
    """Finds, for every node, a later one that rounds or compares its value; linear in the size of the graph.

    The search follows all operations except those that mix many values (matrix products, softmax, normalisations), and
    also memory that is written in place. Opaque calls count as rounding.
    """

    def __init__(self, index: GraphIndex) -> None:
        effects = {node: index.effects.effect(node) for node in index.nodes}
        memory: dict[Node, Node] = {}
        for node, effect in effects.items():
            alias = None if effect.opaque else next(iter(effect.aliases), None)
            memory[node] = node if alias is None else memory[alias]
        rounded: dict[Node, Node] = {}
        self._by: dict[Node, Node] = {}
        for node, effect in reversed(effects.items()):
            targets = [memory[node], *(memory[written] for written in effect.writes)]
            later = next((rounded[value] for value in targets if value in rounded), None)
            if later is not None:
                self._by[node] = later
            name = None if effect.opaque else effect.operation
            for value in node.all_input_nodes:
                source = node if _rounds(index, node, name, value) else None if _stops(node, name) else later
                if source is not None:
                    rounded.setdefault(memory[value], source)

    def by(self, node: Node) -> Node | None:
        """Return a later node that rounds or compares the value of a node, or None."""
        return self._by.get(node)


def _rounds(index: GraphIndex, node: Node, name: str | None, value: Node) -> bool:
    """Return whether a call may round, compare or convert to integers one of its inputs: whether its result jumps."""
    if node.op not in _CALLS:
        return False
    if name is None or node.kwargs.get("rounding_mode") is not None:  # an operation without a name is unknown
        return True
    bare = _bare(name)
    if bare in names.SHAPE_ONLY:
        return False
    if _is_rounding(name) or _has_integer_dtype(node, bare) or _returns_indices(index, node, bare):
        return True
    module = index.module_of(node)
    if _jumps_by(node, bare, value) or _has_rounding_mode(node, bare) or (module and _module_rounds(module)):
        return True
    if bare in names.CASTING_WRITES:
        return _may_hold_integers(node.args[0])
    if bare in names.SELECTING:
        return value is not node.args[0]
    if bare in names.CASTS:
        return _casts_to_integers(node)
    facts = tensor_facts(node)
    return facts is not None and facts.dtype in _INTEGERS and _is_floating(value)


def _stops(node: Node, name: str | None) -> bool:
    """Return whether the last bit of an input has no effect of its own after a call."""
    bare = _bare(name or "")
    return node.op not in _CALLS or bare in names.MIXING or bare in names.SHAPE_ONLY


def _bare(name: str) -> str:
    """Return the name of an operation without the marks of in-place, ``_foreach`` and ``torch.special`` forms."""
    return name.removeprefix("_foreach_").removeprefix("special_").rstrip("_")


def _is_rounding(name: str) -> bool:
    bare = _bare(name)
    listed = name in names.ROUNDING or bare in names.ROUNDING
    return listed or bare.startswith(names.ROUNDING_PREFIXES) or bare.endswith(names.ROUNDING_SUFFIXES)


def _has_integer_dtype(node: Node, bare: str) -> bool:
    """Return whether a call converts to integers by its arguments, or reinterprets the bits as another dtype."""
    dtypes = [argument for argument in _given(node) if isinstance(argument, torch.dtype)]
    return any(dtype in _INTEGERS for dtype in dtypes) or (bare == "view" and bool(dtypes))


def _given(node: Node) -> Iterator[object]:
    yield from node.args
    yield from node.kwargs.values()


def _argument(node: Node, place: int, *keywords: str) -> object:
    """Return an argument by its place or one of its names; None if it is absent."""
    if len(node.args) > place:
        return node.args[place]
    return next((node.kwargs[name] for name in keywords if name in node.kwargs), None)


def _returns_indices(index: GraphIndex, node: Node, bare: str) -> bool:
    """Return whether a call returns indices besides values, and something may read them."""
    if node.op == "call_module":
        returned = bool(getattr(index.module_of(node), "return_indices", False))
    else:
        returned = bare in names.WITH_INDICES or _function_returns_indices(node, bare)
    return returned and not all(_reads_values(user) for user in node.users)


def _function_returns_indices(node: Node, bare: str) -> bool:
    if bare in names.WITH_INDICES_OF_DIM:
        return _has_dim(node)
    operators = (OpOverload, OpOverloadPacket, types.BuiltinFunctionType)
    if bare in names.WITH_INDICES_IN_ATEN and isinstance(node.target, operators):
        return True
    flag = _argument(node, names.RETURN_INDICES[bare], "return_indices") if bare in names.RETURN_INDICES else None
    return flag not in (None, False)


def _has_dim(node: Node) -> bool:
    """Return whether ``max`` and the like may be given a dimension, rather than nothing or another tensor."""
    second = _argument(node, 1, "dim", "other")
    return is_python_number(second) is not False if isinstance(second, Node) else second is not None


def _reads_values(user: Node) -> bool:
    """Return whether a user of values and indices reads only the values, or nothing: exports unpack unused results."""
    if user.op != "call_function" or user.target not in (getattr, operator.getitem):
        return False
    key = user.args[1] if len(user.args) > 1 else None
    return not user.users or key == "values" or (type(key) is int and key == 0)


def _jumps_by(node: Node, bare: str, value: Node) -> bool:
    """Return whether a value is the one argument that a call rounds or compares."""
    if bare in names.JUMPS_BY:
        place, keyword = names.JUMPS_BY[bare]
        return _argument(node, place, keyword) is value
    if bare in names.QUANTILES:
        return node.kwargs.get("interpolation", "linear") != "linear" and _argument(node, 1, "q") is value
    if bare in names.GRID_SAMPLERS:
        mode = _argument(node, 2, "mode", "interpolation_mode")
        return mode not in (None, "bilinear", "bicubic", 0, 2) and _argument(node, 1, "grid") is value
    return False


def _has_rounding_mode(node: Node, bare: str) -> bool:
    """Return whether other arguments make a call round: ``p=0`` of a norm, ``hard`` of the Gumbel softmax."""
    if bare == "gumbel_softmax":
        return _argument(node, 2, "hard") not in (None, False)
    if bare not in names.ORDERS:
        return False
    place, keyword = names.ORDERS[bare]
    return _is_zero(_argument(node, place, keyword, "ord"))


def _is_zero(order: object) -> bool:
    return isinstance(order, int | float) and order == 0


def _module_rounds(module: nn.Module) -> bool:
    """Return whether a torch module rounds by its settings, or contains one that rounds."""
    if type(module) is nn.PairwiseDistance:
        return _is_zero(module.norm)
    return type(module) is nn.Sequential and any(_part_rounds(part) for part in module)


def _part_rounds(part: nn.Module) -> bool:
    listed = _is_rounding(f"nn.{type(part).__name__}") or bool(getattr(part, "return_indices", False))
    return listed or _module_rounds(part)


def _casts_to_integers(node: Node) -> bool:
    """Return whether a conversion may return integers: ``x.to(torch.long)``, ``x.to(y)``, ``x.type(name)``."""
    facts = tensor_facts(node)
    if facts is not None:
        return facts.dtype in _INTEGERS
    given = [*node.args[1:], *node.kwargs.values()]
    if any(isinstance(argument, torch.dtype) and argument not in _INTEGERS for argument in given):
        return False
    harmless = (bool, torch.device, torch.memory_format, type(None))
    return not all(isinstance(argument, harmless) for argument in given)


def _may_hold_integers(node: object) -> bool:
    facts = tensor_facts(node) if isinstance(node, Node) else None
    return facts is None or facts.dtype in _INTEGERS


def _is_floating(node: Node) -> bool:
    facts = tensor_facts(node)
    return facts is not None and (facts.dtype.is_floating_point or facts.dtype.is_complex)
