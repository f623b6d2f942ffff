"""Which calls give what they were given."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fxopt_rewrite.dtypes import dtype_kind
from fxopt_rewrite.index import GraphIndex
from fxopt_rewrite.ops.names import MISSING, argument
from fxopt_rewrite.ops.tables import DROPOUTS, names
from fxopt_rewrite.shapes.facts import same_size, tensor_facts
from fxopt_rewrite.shapes.kinds import Kind
from fxopt_simplify.known_values import KnownValues, Number
from fxopt_simplify.purity import Purity, says_eval
from fxopt_simplify.settled import CASTS, CONVERSIONS, Settled, given_place

_SHAPING = names(
    "view reshape _unsafe_view expand expand_as view_as reshape_as flatten slice narrow squeeze broadcast_to"
)
_ANDS, _ORS = names("and_ __and__ bitwise_and logical_and"), names("or_ __or__ bitwise_or logical_or")
_PACKED = names("contiguous arange full zeros ones")
_FORMATS = (MISSING, None, torch.preserve_format)


class Unchanged(NamedTuple):
    """What a call gives back."""

    value: Node
    copies: bool = False  # whether it gives a copy, in memory of its own
    between: Node | None = None  # a call before it that it undoes


class NoOpReader:
    """Reads the calls of one graph."""

    def __init__(self, index: GraphIndex) -> None:
        self._index = index
        self._known, self._settled = KnownValues(index), Settled(index)
        self._kind = Purity(index).kind

    def read(self, node: Node) -> Unchanged | str | None:
        """Return what a call gives back unchanged, None if it does something, or why it only seems to do nothing."""
        name = self._name(node)
        if name is None or self._index.effects.writes(node):
            return None
        value = _first(node)
        if value is not None and self._is_same_view(node, name, value):
            return Unchanged(value)
        undone = None if value is None else self._undone(node, name, value)
        if undone is not None:
            return Unchanged(undone, between=value)
        if value is not None and (name in CONVERSIONS or name in CASTS):
            return Unchanged(value, name == "_to_copy") if self._converts_nothing(node, name, value) else None
        found = self._arithmetic(node, name) or self._masking(node, name)
        if value is not None and name == "clone" and argument(node, 1, "memory_format") in _FORMATS:
            found = Unchanged(value, copies=True)
        if isinstance(found, Unchanged) and not self._may_share(node, found.value):
            return None
        return found

    def _name(self, node: Node) -> str | None:
        effect = self._index.effects.effect(node)
        return None if effect.opaque else effect.operation

    # -- views

    def _is_same_view(self, node: Node, name: str, value: Node) -> bool:
        if name in DROPOUTS:
            return says_eval(node)
        if name in ("pos", "positive"):
            return True
        if name == "contiguous":
            return argument(node, 1, "memory_format") in (MISSING, torch.contiguous_format) and self._is_packed(value)
        if name == "getitem":
            return _takes_everything(node.args[1]) and self._kind(value) is Kind.TENSOR
        if name in _SHAPING:
            return _keeps_shape(node, name, value) or (_same_shape(node, value) and _same_dtype(node, value))
        return False

    def _is_packed(self, value: Node) -> bool:
        if self._name(value) not in _PACKED:
            return False
        return argument(value, None, "memory_format") in (MISSING, torch.contiguous_format) and len(value.args) < 3

    def _undone(self, node: Node, name: str, value: Node) -> Node | None:
        """Return the value of two views before, if these two undo each other."""
        earlier, source = self._name(value), _first(value)
        if source is None or value.op not in ("call_function", "call_method"):
            return None
        if name == "squeeze" and earlier == "unsqueeze":
            dims = [argument(each, 1, "dim") for each in (value, node)]
            return source if dims[0] == dims[1] and type(dims[0]) is int else None
        orders = _order(value, earlier), _order(node, name)
        if orders[0] is None or orders[1] is None:
            return None
        return source if [orders[0][place] for place in orders[1]] == list(range(len(orders[0]))) else None

    # -- conversions

    def _converts_nothing(self, node: Node, name: str, value: Node) -> bool:
        options = [*node.args[1:], *node.kwargs.values()]
        if any(isinstance(option, Node) or option is True for option in options):
            return False
        if any(isinstance(option, torch.layout) and option is not torch.strided for option in options):
            return False
        if any(isinstance(option, torch.memory_format) and option is not torch.preserve_format for option in options):
            return False
        has = self._settled.place(value)
        dtype, device = given_place(node)
        if name in CASTS:
            return not options and has.dtype is CASTS[name]
        known = tensor_facts(value)
        if known is None or not options or (dtype is None and device is None):
            return False
        return dtype in (None, has.dtype) and device in (None, has.device)

    # -- arithmetic

    def _arithmetic(self, node: Node, name: str) -> Unchanged | str | None:
        if name not in _NEUTRAL or len(node.args) != 2 or node.kwargs:
            return None
        left, right = node.args
        pairs = [(left, right)] if name in _ONE_SIDED else [(left, right), (right, left)]
        for value, other in pairs:
            if not isinstance(value, Node) or isinstance(other, (list, tuple)):
                continue
            facts, result = tensor_facts(value), tensor_facts(node)
            number = self._number(other)
            if number is None or facts is None or result is None or facts.dtype != result.dtype:
                continue
            if isinstance(other, Node) and not _same_shape(node, value):
                continue
            kind = dtype_kind(facts.dtype)
            if number != _NEUTRAL[name] or kind not in ("integer", "floating"):
                continue
            if kind == "integer" and (type(number) is not int or name in ("div", "truediv")):
                continue
            sign = math.copysign(1, number)
            if kind == "floating" and (name, sign) in (("add", 1.0), ("sub", -1.0)):
                return "signed-zero"
            return Unchanged(value, copies=True)
        return None

    def _number(self, operand: object) -> Number | None:
        """Return the value of a literal number, or of all elements of a tensor where it is known."""
        if isinstance(operand, (int, float)):
            return None if isinstance(operand, bool) else operand
        return self._known.value(operand)

    # -- masks

    def _masking(self, node: Node, name: str) -> Unchanged | None:
        value: object = None
        if name == "where" and len(node.args) == 3:
            chosen = self._known.value(node.args[0])
            value = None if chosen is None else node.args[1] if chosen else node.args[2]
        elif name == "masked_fill" and len(node.args) == 3 and self._known.value(node.args[1]) is False:
            value = node.args[0]
        elif (name in _ANDS or name in _ORS) and len(node.args) == 2:
            neutral = name in _ANDS
            for mine, other in (node.args, node.args[::-1]):
                if not isinstance(mine, Node) or not _is_mask(mine) or self._known.value(other) is not neutral:
                    continue
                if _same_shape(node, mine) or _is_expanded(node, mine):
                    return Unchanged(mine, copies=True)
        if isinstance(value, Node) and _same_shape(node, value) and _same_dtype(node, value):
            return Unchanged(value, copies=True)
        return None

    def without_mask(self, node: Node) -> tuple[tuple[Any, ...], Mapping[str, Any]] | None:
        """Return the arguments of an attention without its mask, if that masks nothing."""
        if self._name(node) != "scaled_dot_product_attention" or node.op != "call_function":
            return None
        mask = argument(node, 3, "attn_mask")
        value = self._known.value(mask)
        neutral = value is True or (type(value) is float and value == 0)
        query, facts = _first(node, "query"), tensor_facts(mask) if isinstance(mask, Node) else None
        causal = argument(node, 5, "is_causal")
        if not neutral or query is None or facts is None or causal not in (MISSING, False):
            return None
        own, result = tensor_facts(query), tensor_facts(node)
        if own is None or result is None or not _same_sizes(own, result, own.shape[:-1], result.shape[:-1]):
            return None
        args = (*node.args[:3], None, *node.args[4:]) if len(node.args) > 4 else node.args[:3]
        return args, {key: each for key, each in node.kwargs.items() if key != "attn_mask"}

    # -- copies

    def _may_share(self, node: Node, value: Node) -> bool:
        """Return whether no reader of a copy may notice the strides of the original."""
        if not self._index.effects.aliases(value) and value.op in ("call_function", "call_method", "call_module"):
            return not self._index.effects.effect(value).opaque and _same_rank(node, value)
        effects = [self._index.effects.effect(user) for user in node.users]
        if any(effect.opaque or effect.operation is None or node in effect.aliases for effect in effects):
            return False
        return not self._index.effects.needs_own_memory(node)


_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1, "truediv": 1, "pow": 1}
_ONE_SIDED = frozenset({"sub", "div", "truediv", "pow"})


def _first(node: Node, *keywords: str) -> Node | None:
    """Return the first argument of a call, by place or name, if it is a node."""
    given = [*node.args[:1], *(node.kwargs[key] for key in ("input", "self", *keywords) if key in node.kwargs)]
    return given[0] if given and isinstance(given[0], Node) else None


def _takes_everything(index: object) -> bool:
    """Return whether an index is made of full slices alone."""
    items = index if isinstance(index, tuple) else (index,)
    return bool(items) and all(item is ... or (isinstance(item, slice) and item == slice(None)) for item in items)


def _keeps_shape(node: Node, name: str, value: Node) -> bool:
    """Return whether a call gives the same shape by its arguments alone."""
    if name == "slice":
        start, end = argument(node, 2, "start"), argument(node, 3, "end")
        far = end in (MISSING, None) or (type(end) is int and end >= sys.maxsize)
        return start in (MISSING, None, 0) and far and argument(node, 4, "step") in (MISSING, None, 1)
    given = node.args[1:] if len(node.args) > 1 else tuple(node.kwargs.values())
    if name in ("view_as", "expand_as", "reshape_as"):
        return given == (value,)
    sizes = given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given
    if name in ("expand", "broadcast_to") and sizes and all(type(size) is int and size == -1 for size in sizes):
        return True
    shape = given[0] if len(given) == 1 and isinstance(given[0], Node) else None
    return shape is not None and name not in ("flatten", "squeeze", "narrow") and _is_shape_of(shape, value)


def _is_shape_of(shape: Node, value: Node) -> bool:
    if shape.target is getattr or shape.target == "size":
        return shape.args in ((value,), (value, "shape")) and not shape.kwargs
    return False


def _same_sizes(one: Any, other: Any, ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return bool(one.proven and other.proven and len(ones) == len(others) and all(map(same_size, ones, others)))


def _same_shape(node: Node, value: Node) -> bool:
    """Return whether two values have the same shape for every input of the graph."""
    one, other = tensor_facts(node), tensor_facts(value)
    return one is not None and other is not None and _same_sizes(one, other, one.shape, other.shape)


def _same_dtype(node: Node, value: Node) -> bool:
    one, other = tensor_facts(node), tensor_facts(value)
    return one is not None and other is not None and one.dtype == other.dtype


def _same_rank(node: Node, value: Node) -> bool:
    one, other = tensor_facts(node), tensor_facts(value)
    return one is not None and other is not None and one.rank == other.rank


def _is_mask(node: Node) -> bool:
    facts = tensor_facts(node)
    return facts is not None and facts.dtype is torch.bool


def _is_expanded(node: Node, value: Node) -> bool:
    """Return whether all readers expand a value themselves, so that they may read a smaller one.

    That is ``expand`` to sizes that it names, and attention, which expands its mask to its scores.
    """
    one, other = tensor_facts(node), tensor_facts(value)
    if one is None or other is None or not (one.proven and other.proven) or one.rank != other.rank:
        return False
    for user in node.users:
        if "scaled_dot_product_attention" in str(user.target) and argument(user, 3, "attn_mask") is node:
            if node in user.args[:3] or one.rank < 2:
                return False
            continue
        sizes = user.args[1] if len(user.args) == 2 else None
        if user.target is not torch.ops.aten.expand.default or not isinstance(sizes, (list, tuple)) or user.kwargs:
            return False
        if user.args[0] is not node or len(sizes) < one.rank:
            return False
        for size, mine, its in zip(sizes[len(sizes) - one.rank :], one.shape, other.shape, strict=True):
            if size == -1 and not same_size(mine, its):
                return False
    return True


def _order(node: Node, name: str | None) -> list[int] | None:
    """Return the order in which a call puts the dimensions, where literals say so."""
    facts = tensor_facts(node)
    given: Any = node.args[1:]
    if name == "permute" and not node.kwargs:
        given = given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given
        places = list(given)
    elif name in ("transpose", "swapaxes", "swapdims") and len(given) == 2 and not node.kwargs:
        places = list(given)
    else:
        return None
    if not all(type(place) is int for place in places):
        return None
    rank = facts.rank if facts is not None else len(places) if name == "permute" else None
    if rank is None and min(places) < 0:
        return None
    places = [place + rank if place < 0 and rank is not None else place for place in places]
    if name == "permute":
        return [*places, *range(len(places), _LONGEST)]
    order = list(range(_LONGEST))
    order[places[0]], order[places[1]] = places[1], places[0]
    return order


_LONGEST = 64
"""As many dimensions as a tensor can have: orders are compared over all of them."""
