"""Whether one call rounds or compares what it is given: whether its result jumps where an input's last bit changes."""

from __future__ import annotations

import operator
import types
from collections.abc import Iterator

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node

from fxopt_arith import rounding_names as names
from fxopt_core import GraphIndex, is_python_number, tensor_facts

_CALLS = ("call_function", "call_method", "call_module")
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def rounds(index: GraphIndex, node: Node, name: str | None, value: Node) -> bool:
    """Return whether a call may round, compare or convert to integers one of its inputs.

    Args:
        index: facts about the graph.
        node: the call.
        name: the operation that it calls; None where that is not known, and then it may.
        value: the input.
    """
    if node.op not in _CALLS:
        return False
    if name is None or node.kwargs.get("rounding_mode") is not None:
        return True
    bare = _bare(name)
    if bare in names.SHAPE_ONLY:
        return False
    if _is_rounding(name) or _has_integer_dtype(node, bare) or _tells_indices(index, node, bare):
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


def stops(node: Node, name: str | None) -> bool:
    """Return whether a last bit has no meaning behind a call."""
    bare = _bare(name or "")
    return node.op not in _CALLS or bare in names.MIXING or bare in names.SHAPE_ONLY


def _bare(name: str) -> str:
    """Return the name of an operation, whether it works in place, on lists, or stands in ``torch.special``."""
    return name.removeprefix("_foreach_").removeprefix("special_").rstrip("_")


def _is_rounding(name: str) -> bool:
    bare = _bare(name)
    listed = name in names.ROUNDING or bare in names.ROUNDING
    return listed or bare.startswith(names.ROUNDING_PREFIXES) or bare.endswith(names.ROUNDING_SUFFIXES)


def _has_integer_dtype(node: Node, bare: str) -> bool:
    """Return whether a call is told to convert to integers, or to read the bits as another dtype."""
    told = [argument for argument in _given(node) if isinstance(argument, torch.dtype)]
    return any(dtype in _INTEGERS for dtype in told) or (bare == "view" and bool(told))


def _given(node: Node) -> Iterator[object]:
    yield from node.args
    yield from node.kwargs.values()


def _argument(node: Node, place: int, *keywords: str) -> object:
    """Return an argument by its place or one of its names; None where it is not given."""
    if len(node.args) > place:
        return node.args[place]
    return next((node.kwargs[name] for name in keywords if name in node.kwargs), None)


def _tells_indices(index: GraphIndex, node: Node, bare: str) -> bool:
    """Return whether a call gives indices beside its values, and something may read them."""
    if node.op == "call_module":
        gives = bool(getattr(index.module_of(node), "return_indices", False))
    else:
        gives = bare in names.WITH_INDICES or _gives_indices(node, bare)
    return gives and not all(_reads_values(user) for user in node.users)


def _gives_indices(node: Node, bare: str) -> bool:
    if bare in names.WITH_INDICES_OF_DIM:
        return _has_dim(node)
    operators = (OpOverload, OpOverloadPacket, types.BuiltinFunctionType)
    if bare in names.WITH_INDICES_IN_ATEN and isinstance(node.target, operators):
        return True
    flag = _argument(node, names.RETURN_INDICES[bare], "return_indices") if bare in names.RETURN_INDICES else None
    return flag not in (None, False)


def _has_dim(node: Node) -> bool:
    """Return whether ``max`` and the like are given a dimension, or may be, rather than nothing or another tensor."""
    second = _argument(node, 1, "dim", "other")
    return is_python_number(second) is not False if isinstance(second, Node) else second is not None


def _reads_values(user: Node) -> bool:
    """Return whether a user of values and indices takes the values alone, or nothing: exports unpack what is unused."""
    if user.op != "call_function" or user.target not in (getattr, operator.getitem):
        return False
    key = user.args[1] if len(user.args) > 1 else None
    return not user.users or key == "values" or (type(key) is int and key == 0)


def _jumps_by(node: Node, bare: str, value: Node) -> bool:
    """Return whether a value is that argument of a call which alone it rounds or compares."""
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
    """Return whether other arguments make a call count or choose: ``p=0`` of a norm, ``hard`` of Gumbel's softmax."""
    if bare == "gumbel_softmax":
        return _argument(node, 2, "hard") not in (None, False)
    if bare not in names.ORDERS:
        return False
    place, keyword = names.ORDERS[bare]
    return _is_zero(_argument(node, place, keyword, "ord"))


def _is_zero(order: object) -> bool:
    return isinstance(order, int | float) and order == 0


def _module_rounds(module: nn.Module) -> bool:
    """Return whether a module of torch rounds by how it is set up, or because one within it does."""
    if type(module) is nn.PairwiseDistance:
        return _is_zero(module.norm)
    return type(module) is nn.Sequential and any(_part_rounds(part) for part in module)


def _part_rounds(part: nn.Module) -> bool:
    listed = _is_rounding(f"nn.{type(part).__name__}") or bool(getattr(part, "return_indices", False))
    return listed or _module_rounds(part)


def _casts_to_integers(node: Node) -> bool:
    """Return whether a conversion gives integers, or may: ``x.to(torch.long)``, ``x.to(y)``, ``x.type(name)``."""
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
