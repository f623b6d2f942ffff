"""Which values have the same dtype and device for every input, and wherever the graph module is moved.

``x.to(torch.float32)`` does nothing for an input in float32, but something for one in float16, or after
``graph_module.double()``. It certainly does nothing if literals in the graph decide dtype and device: in ``arange``, a
comparison, or an earlier conversion.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import torch
from torch.fx import Node

from fxopt_rewrite import (
    GraphIndex,
    Kind,
    argument,
    tensor_facts,
    words,
)
from fxopt_simplify.purity import FACTORIES, FACTORIES_LIKE, SAME_ELEMENTS, Purity

_COMPARISONS = words("eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isinf isfinite isin")
CONVERSIONS = words("to _to_copy type")
_PLACING = FACTORIES | FACTORIES_LIKE | CONVERSIONS
CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bool": torch.bool,
    "long": torch.int64,
    "int": torch.int32,
    "short": torch.int16,
}
_FOLLOWING = SAME_ELEMENTS | words(
    """
    tril triu cumsum flip index gather cat stack add sub mul neg abs and_ or_ invert bitwise_and bitwise_or bitwise_not
    bitwise_xor __and__ __or__ __xor__ where masked_fill minimum maximum floordiv remainder floor_divide
    """
)


class Place(NamedTuple):
    """The settled dtype and device of a value."""

    dtype: torch.dtype | None
    device: torch.device | None


_NOTHING = Place(None, None)


class Settled:
    """What is settled about the values of a graph; linear in its size.

    >>> from fxopt_rewrite import infer_shapes
    >>> graph_module = infer_shapes(torch.fx.symbolic_trace(lambda x: (x > 0) & (x + 1 > 0)), torch.zeros(3))
    >>> settled = Settled(GraphIndex(graph_module))
    >>> [settled.place(node).dtype for node in graph_module.graph.nodes]
    [None, torch.bool, None, torch.bool, torch.bool, None]
    """

    def __init__(self, index: GraphIndex) -> None:
        self._index = index
        self._found: dict[Node, Place] = {}
        self._kind = Purity(index).kind
        # The check of the inputs that capture puts into a graph: it refuses other kinds of dtype.
        self._checked = any(getattr(index.module_of(node), "keeps_kinds", False) for node in index.nodes)
        for node in index.nodes:
            operation = index.effects.effect(node).operation
            if node.op in ("call_function", "call_method") and operation is not None:
                self._found[node] = self._read(node, operation)

    def place(self, node: Node) -> Place:
        """Return what is settled about a node's value."""
        return self._found.get(node, _NOTHING)

    def keeps_kind(self, node: Node) -> bool:
        """Return whether a value is floating-point, or integer, or boolean, for every input as in its description."""
        return self._checked or node.op == "get_attr" or self.place(node).dtype is not None

    def _read(self, node: Node, name: str) -> Place:
        first = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        before = _NOTHING if first is None else self.place(first)
        if name in _COMPARISONS or name in _FOLLOWING:
            return self._following(node, name)
        if name in CASTS and len(node.args) == 1 and not node.kwargs:
            return Place(CASTS[name], before.device)
        if name not in _PLACING:
            return _NOTHING
        dtype, device = given_place(node)
        options = [value for key, value in node.kwargs.items() if key in ("dtype", "device", "other")]
        options += node.args[1:] if name in CONVERSIONS else ()
        # A dtype or device that the graph reads off another value, or a dtype as text.
        if any(isinstance(value, Node) for value in options) or (name == "type" and dtype is None):
            return _NOTHING
        if name in FACTORIES:
            return Place(dtype or _default_dtype(node), device)
        return Place(dtype or before.dtype, device or before.device)

    def _following(self, node: Node, name: str) -> Place:
        tensors = [value for value in node.all_input_nodes if self._kind(value) is not Kind.NUMBER]
        places = [self.place(value) for value in tensors]
        facts = tensor_facts(node)
        known = facts is not None and bool(places) and all(place.dtype is not None for place in places)
        dtype = torch.bool if name in _COMPARISONS else facts.dtype if facts is not None and known else None
        if dtype is not None and dtype.is_floating_point and all(place.dtype != dtype for place in places):
            dtype = None  # torch's default dtype, as of ``positions * 0.5``
        devices = {place.device for place in places}
        return Place(dtype, devices.pop() if len(devices) == 1 else None)


def _default_dtype(node: Node) -> torch.dtype | None:
    """Return the dtype that a factory uses if none is given; None for torch's default, which varies."""
    facts = tensor_facts(node)
    return None if facts is None or facts.dtype.is_floating_point or facts.dtype.is_complex else facts.dtype


def given_place(node: Node) -> Place:
    """Return the literal dtype and device among the arguments of a call."""
    given = (*node.args, *node.kwargs.values())
    dtype = next((value for value in given if isinstance(value, torch.dtype)), None)
    device = next((value for value in given if isinstance(value, torch.device)), None)
    text = argument(node, 1, "device")
    if device is None and type(text) is str:
        with suppress(RuntimeError):  # ``x.type("torch.FloatTensor")``
            device = torch.device(text)
    return Place(dtype, device)
