"""Find calls that return what they are given."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from fxopt_core import Refusal
from fxopt_rewrite import (
    DROPOUTS,
    GraphIndex,
    Kind,
    Operation,
    argument,
    changes_mode,
    read_operation,
    replacement_refusal,
    same_size,
    same_sizes,
    tensor_facts,
    words,
)
from fxopt_simplify.known_values import KnownValues
from fxopt_simplify.purity import CallSite, Purity
from fxopt_simplify.settled import CASTS, CONVERSIONS, Settled, given_place

_SHAPING = words(
    "view reshape _unsafe_view expand expand_as view_as reshape_as flatten slice narrow squeeze broadcast_to"
)
#: Operations that write numbers into their first operand, where they are in place, and change nothing else of it.
_NUMBERS_WRITTEN = words("add sub mul div relu relu6 silu hardswish hardsigmoid hardtanh leaky_relu elu clamp")
_ANDS, _ORS = words("bitwise_and logical_and"), words("bitwise_or logical_or")


@dataclass(frozen=True, eq=False)
class NoOp(CallSite):
    """A call that changes nothing, or an argument that has no effect on its call.

    Attributes:
        value: what its readers may read instead; the call itself if it only loses an argument.
        args: the arguments that the call keeps, if it only loses one.
        kwargs: its keyword arguments then.
    """

    value: Node
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


class NoOpReader:
    """Reads the calls of one graph."""

    def __init__(self, index: GraphIndex) -> None:
        self._index = index
        self._known, self._settled = KnownValues(index), Settled(index)
        self._kind = Purity(index).kind

    def read(self, node: Node) -> NoOp | Refusal | None:
        """Read a call that changes nothing; None if it does something, a refusal if it only seems to do nothing."""
        if node.target is torch.ops.aten.detach_.default:
            return self._without_detaching(node)
        call = read_operation(self._index, node)
        if call is None or call.name not in _READ:  # before its arguments are bound, which takes longest
            return None
        name, value = call.name, call.input
        if name == "scaled_dot_product_attention":
            return self._without_mask(call)
        if name == "identity" or name in DROPOUTS:
            training = call.arguments.get("training", False)
            if value is None or isinstance(training, Node):
                return None
            message = f"node `{node.name}` is dropout in train mode, and drops values"
            return self._index.refuse(node.name, "training", message, node) if training else NoOp(node, value)
        if call.module is not None or call.inplace or self._index.effects.writes(node):
            return None
        if value is not None and self._is_same_view(call, value):
            same = self._writes_only_numbers and not self._index.is_returned(node)
            return NoOp(node, value) if same else self._replaced(NoOp(node, value))
        if value is not None and (name in CONVERSIONS or name in CASTS):
            # ``to`` returns its input where nothing changes; ``_to_copy`` copies it, which a later write would show.
            copies = (value,) if name == "_to_copy" else ()
            return self._replaced(NoOp(node, value), *copies) if self._converts_nothing(node, name, value) else None
        found = self._arithmetic(call) or self._masking(call)
        if value is not None and name == "clone" and call.arguments["memory_format"] in (None, torch.preserve_format):
            found = value
        return self._replaced(NoOp(node, found), found) if found is not None and self._may_share(node, found) else None

    def _replaced(self, site: NoOp, *copied: Node) -> NoOp | Refusal:
        """Return the site, or why its readers may not read another tensor, computed from what it copies."""
        return replacement_refusal(site.label, site.node, self._index, *copied) or site

    # -- views

    @cached_property
    def _writes_only_numbers(self) -> bool:
        """Return whether a view and its source stay alike: no call changes sizes, strides or modes in place."""
        writers = [node for node in self._index.nodes if self._index.effects.writes(node) or changes_mode(node)]
        calls = [None if "out" in node.kwargs else read_operation(self._index, node) for node in writers]  # it may grow
        return all(call is not None and call.inplace and call.name in _NUMBERS_WRITTEN for call in calls)

    def _is_same_view(self, call: Operation, value: Node) -> bool:
        if call.name == "getitem":
            return _takes_everything(call.arguments["index"]) and self._kind(value) is Kind.TENSOR
        if call.name in _SHAPING:
            # ``x.view(torch.float32)`` reads the same bits as other numbers.
            if call.name == "view" and given_place(call.node).dtype is not None:
                return given_place(call.node).dtype is self._settled.place(value).dtype
            if any(self._kind(each) is Kind.PLAIN for each in call.node.all_input_nodes):
                return False  # ``view`` in a dtype that the graph reads
            return self._keeps_shape(call, value) or _same_shape(call.node, value)
        return False

    def _keeps_shape(self, call: Operation, value: Node) -> bool:
        """Return whether a call keeps the shape, judging by its arguments alone."""
        arguments = call.arguments
        if call.name == "slice":
            start, end = arguments["start"], arguments["end"]
            # torch.export writes ``x[:]`` as a slice up to 2**63 - 1.
            far = end is None or (type(end) is int and end >= sys.maxsize)
            return start in (None, 0) and far and arguments["step"] in (None, 1)
        sizes = arguments.get("size", arguments.get("shape"))
        if call.name in ("expand", "broadcast_to") and isinstance(sizes, tuple) and set(sizes) == {-1}:
            return True
        shape = read_operation(self._index, sizes) if isinstance(sizes, Node) else None
        return shape is not None and shape.name == "size" and shape.input is value and shape.arguments["dim"] is None

    # -- conversions

    def _converts_nothing(self, node: Node, name: str, value: Node) -> bool:
        options = [*node.args[1:], *node.kwargs.values()]
        forms = [option for option in options if isinstance(option, (torch.layout, torch.memory_format))]
        changing = [option for option in forms if option not in (torch.strided, torch.preserve_format)]
        # ``copy=True``, or an option that the graph computes.
        if changing or any(isinstance(option, Node) or option is True for option in options):
            return False
        has = self._settled.place(value)
        dtype, device = given_place(node)
        if name in CASTS:
            return not options and has.dtype is CASTS[name]
        if tensor_facts(value) is None or not options or (dtype is None and device is None):
            return False
        return dtype in (None, has.dtype) and device in (None, has.device)

    # -- arithmetic

    def _arithmetic(self, call: Operation) -> Node | None:
        """Return x of ``x * 1``, ``1 * x``, ``x / 1`` and ``x ** 1``, for floating-point x."""
        given = {**_MODIFIERS, **call.arguments}
        if call.name not in _NEUTRAL or len(call.operands) != 2 or any(given[key] for key in _MODIFIERS):
            return None
        value, number = call.operands
        if call.name == "mul" and not isinstance(value, Node):
            value, number = number, value
        if not isinstance(value, Node) or type(number) not in (int, float) or number != 1:
            return None
        facts = tensor_facts(value)
        # ``x * 1.0`` and ``x / 1`` make floats of integers.
        floats = facts is not None and facts.dtype.is_floating_point and self._settled.keeps_kind(value)
        return value if floats else None

    def _keeps_dtype(self, value: Node, other: object) -> bool:
        """Return whether a value decides the dtype of a result with another operand, whatever the inputs are."""
        facts, its = tensor_facts(value), tensor_facts(other) if isinstance(other, Node) else None
        # Of numbers and tensors without dimensions, only the kind counts in type promotion, not the dtype.
        if its is None or (facts is not None and its.rank == 0 < facts.rank):
            return self._settled.keeps_kind(value)
        return all(self._settled.place(each).dtype is not None for each in (value, other) if isinstance(each, Node))

    # -- masks

    def _is_mask(self, node: Node) -> bool:
        facts = tensor_facts(node)
        return facts is not None and facts.dtype is torch.bool and self._settled.keeps_kind(node)

    def _masking(self, call: Operation) -> Node | None:
        node, name, arguments = call.node, call.name, call.arguments
        value: object = None
        if name == "where" and "other" in arguments:
            chosen = self._known.value(arguments["condition"])
            value, other = (arguments[key] for key in (("input", "other") if chosen else ("other", "input")))
            if chosen is None or not isinstance(value, Node) or not self._keeps_dtype(value, other):
                return None
        elif name == "masked_fill" and self._known.value(arguments["mask"]) is False:
            value = arguments["input"]
        elif (name in _ANDS or name in _ORS) and len(call.operands) == 2:
            neutral = name in _ANDS
            for mine, other in (call.operands, call.operands[::-1]):
                if not isinstance(mine, Node) or not self._is_mask(mine) or self._known.value(other) is not neutral:
                    continue
                if _same_shape(node, mine) or _is_expanded(node, mine):
                    return mine
        return value if isinstance(value, Node) and _same_shape(node, value) else None

    def _without_mask(self, call: Operation) -> NoOp | None:
        """Read an attention whose mask masks nothing."""
        node, mask = call.node, call.arguments["attn_mask"]
        value = self._known.value(mask)
        neutral = value is True or (type(value) is float and value == 0)
        query, facts = call.input, tensor_facts(mask) if isinstance(mask, Node) else None
        if not neutral or query is None or facts is None or call.arguments["is_causal"] is not False:
            return None
        own, result = tensor_facts(query), tensor_facts(node)
        # A mask may also broadcast the result to more dimensions than the query has.
        if own is None or result is None or not _same_sizes(own, result, own.shape[:-1], result.shape[:-1]):
            return None
        args = (*node.args[:3], None, *node.args[4:]) if len(node.args) > 4 else node.args[:3]
        return NoOp(node, node, args, {key: each for key, each in node.kwargs.items() if key != "attn_mask"})

    # -- copies

    def _without_detaching(self, node: Node) -> NoOp | Refusal | None:
        """Read ``detach_`` of a constant's copy, as torch.export writes ``torch.tensor(...)`` in a forward."""
        copy = argument(node, 0, "self")
        if not isinstance(copy, Node) or copy.target is not torch.ops.aten.lift_fresh_copy.default:
            return None
        constant = argument(copy, 0, "self")
        tensor = self._index.tensor_of(constant) if isinstance(constant, Node) else None
        return None if tensor is None or tensor.requires_grad else self._replaced(NoOp(node, copy))

    def _may_share(self, node: Node, value: Node) -> bool:
        """Return whether no reader of a copy may notice the strides of the original."""
        if not self._index.effects.aliases(value) and value.op in ("call_function", "call_method", "call_module"):
            return not self._index.effects.effect(value).opaque and _same_rank(node, value)
        effects = [self._index.effects.effect(user) for user in node.users]
        if any(effect.opaque or effect.operation is None or node in effect.aliases for effect in effects):
            return False
        return not self._index.effects.needs_own_memory(node)


_NEUTRAL = frozenset({"mul", "div", "pow"})
_MODIFIERS: Mapping[str, object] = {"rounding_mode": None, "out": None}


def _takes_everything(index: object) -> bool:
    """Return whether an index is made of full slices alone."""
    items = index if isinstance(index, tuple) else (index,)
    return bool(items) and all(item is ... or (isinstance(item, slice) and item == slice(None)) for item in items)


def _same_sizes(one: Any, other: Any, ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return bool(one.proven and other.proven and same_sizes(ones, others))


def _same_shape(node: Node, value: Node) -> bool:
    """Return whether two values have one dtype, and the same shape for every input of the graph."""
    one, other = tensor_facts(node), tensor_facts(value)
    if one is None or other is None or one.dtype != other.dtype:
        return False
    return _same_sizes(one, other, one.shape, other.shape)


def _same_rank(node: Node, value: Node) -> bool:
    one, other = tensor_facts(node), tensor_facts(value)
    return one is not None and other is not None and one.rank == other.rank


def _is_expanded(node: Node, value: Node) -> bool:
    """Return whether all readers expand a value themselves, so that they may read a smaller one.

    Such readers are ``expand`` to sizes that it names, and attention, which expands its mask to its scores.
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


_READ = words(
    """
    identity getitem clone where masked_fill scaled_dot_product_attention
    """
).union(_SHAPING, _ANDS, _ORS, _NEUTRAL, DROPOUTS, CONVERSIONS, CASTS)
