"""Bounds of tensors that hold whatever the inputs of the graph are: masks of ones, positions from 0 on.

A value is known by its bounds, both included. They follow from ``arange``, ``full`` and the like through views,
conversions, arithmetic and comparisons; a tensor whose bounds are equal holds one value. Parameters and buffers are
never known: they are loaded and trained.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fxopt_rewrite import (
    MISSING,
    GraphIndex,
    TensorFacts,
    argument,
    is_python_number,
    tensor_facts,
    words,
)
from fxopt_simplify.purity import SAME_ELEMENTS

Number = bool | int | float

_FILLED: dict[str, Number] = {"zeros": 0, "ones": 1, "zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}
_FILLED_WITH = {"full": (1, "fill_value"), "full_like": (1, "fill_value"), "new_full": (2, "fill_value")}
_FILLED_WITH |= {"scalar_tensor": (0, "s")}
_CONVERSIONS = words("to _to_copy type type_as float half double bfloat16 long int short bool")
_ELEMENTWISE = words(
    """
    add sub rsub mul div truediv neg abs and_ or_ invert bitwise_and bitwise_or bitwise_not logical_and logical_or
    logical_not __and__ __or__ eq ne lt le gt ge where masked_fill
    """
)


class Bounds(NamedTuple):
    """The least and the greatest value that an element of a tensor may have."""

    low: Number
    high: Number

    @property
    def value(self) -> Number | None:
        """The value of all elements, if they have one and the same."""
        # 0.0 and -0.0 are equal, but not the same value.
        same = type(self.low) is type(self.high) and self.low == self.high
        return self.low if same and math.copysign(1, self.low) == math.copysign(1, self.high) else None

    def __or__(self, other: Bounds) -> Bounds:
        """Return the bounds of a value that is one or the other."""
        return Bounds(min(self.low, other.low), max(self.high, other.high))

    def plus(self, other: Bounds) -> Bounds:
        """Return the bounds of the sum."""
        return Bounds(self.low + other.low, self.high + other.high)

    def times(self, other: Bounds) -> Bounds:
        """Return the bounds of the product; 0 times infinity counts as unknown."""
        ends = [one * two for one in self for two in other]
        return ANYTHING if any(math.isnan(end) for end in ends) else Bounds(min(ends), max(ends))

    def fit(self, dtype: torch.dtype) -> bool:
        """Return whether all values are finite in a floating-point dtype."""
        return -torch.finfo(dtype).max <= self.low <= self.high <= torch.finfo(dtype).max


ANYTHING = Bounds(-math.inf, math.inf)


class KnownValues:
    """The values of a graph that are known before it runs.

    >>> from fxopt_rewrite import infer_shapes
    >>> def positions(x):
    ...     return (torch.arange(x.shape[0]) + 1).unsqueeze(0) >= 1
    >>> graph_module = infer_shapes(torch.fx.symbolic_trace(positions), torch.zeros(3))
    >>> known = KnownValues(GraphIndex(graph_module))
    >>> known.value(graph_module.graph.output_node().args[0])
    True
    """

    def __init__(self, index: GraphIndex) -> None:
        self._found: dict[Node, Bounds] = {}
        for node in index.nodes:
            if node.op in ("call_function", "call_method"):
                effect = index.effects.effect(node)
                facts = tensor_facts(node)
                if effect.operation is not None and not effect.opaque and not effect.writes and facts is not None:
                    found = self._read(node, effect.operation, facts)
                    if found is not None and not index.is_written_after(node):
                        self._found[node] = found

    def value(self, node: object) -> Number | None:
        """Return the value of all elements of a tensor, or None."""
        found = self._found.get(node) if isinstance(node, Node) else None
        return None if found is None else found.value

    def _read(self, node: Node, name: str, facts: TensorFacts) -> Bounds | None:
        if name == "arange":
            return _arange(node, facts)
        if name in _FILLED:
            return _uniform(_FILLED[name], facts)
        if name in _FILLED_WITH:
            return _uniform(argument(node, *_FILLED_WITH[name]), facts)
        source = node.args[0] if node.args else None
        given = self._found.get(source) if isinstance(source, Node) else None
        if given is not None and name in SAME_ELEMENTS:
            before = tensor_facts(source) if isinstance(source, Node) else None
            return given if before is not None and before.dtype == facts.dtype else None
        if given is not None and name in _CONVERSIONS:
            return _converted(given, facts)
        if name not in _ELEMENTWISE or (name == "sub" and "alpha" in node.kwargs):
            return None
        return self._shifted(node, name, given, facts) or self._computed(node, facts)

    def _shifted(self, node: Node, name: str, given: Bounds | None, facts: TensorFacts) -> Bounds | None:
        """Return the bounds of ``x + c`` and of ``x >= c``, for integers."""
        other = node.args[1] if len(node.args) == 2 and not node.kwargs else None
        if given is None or type(other) is not int or (isinstance(given.low, float) and math.isfinite(given.low)):
            return None
        if name == "ge":
            return Bounds(True, True) if given.low >= other else None
        if name in ("add", "sub") and given.value is None:
            shift = other if name == "add" else -other
            return _in_range(Bounds(given.low + shift, given.high + shift), facts)
        return None

    def _computed(self, node: Node, facts: TensorFacts) -> Bounds | None:
        """Compute one element where all operands have known values."""
        operands: list[Node] = node.all_input_nodes
        if not operands:
            return None
        elements: dict[Node, Tensor] = {}
        for operand in operands:
            known, value = tensor_facts(operand), self.value(operand)
            if known is None or value is None:
                return None
            # One dimension stands for several: type promotion only treats tensors without dimensions differently.
            elements[operand] = torch.full([1] * min(known.rank, 1), value, dtype=known.dtype)
        args: Any = map_arg(node.args, elements.__getitem__)
        kwargs: Any = map_arg(node.kwargs, elements.__getitem__)
        function: Any = getattr(Tensor, str(node.target)) if node.op == "call_method" else node.target
        try:
            result = function(*args, **kwargs)
        except (RuntimeError, TypeError):  # a size, or an argument that one element does not take
            return None
        fits = isinstance(result, Tensor) and result.dtype == facts.dtype and result.numel() == 1
        return Bounds(result.item(), result.item()) if fits and not facts.dtype.is_complex else None


def _arange(node: Node, facts: TensorFacts) -> Bounds | None:
    if facts.dtype not in (torch.int64, torch.int32) or argument(node, 2, "step") not in (MISSING, 1):
        return None
    given = [*node.args[:2]] if len(node.args) > 1 else [0, *node.args]
    start = node.kwargs.get("start", given[0])
    ends = [value for value in (given[1:2] or [node.kwargs.get("end")]) if value is not None]
    whole = all(type(end) is int or (isinstance(end, Node) and is_python_number(end)) for end in ends)
    if type(start) is not int or not ends or not whole:
        return None
    return _in_range(Bounds(start, min(start + _MOST_ELEMENTS, torch.iinfo(facts.dtype).max)), facts)


#: More elements than a tensor of int64 can have, whose bytes are counted in int64.
_MOST_ELEMENTS = 2**60


def _in_range(found: Bounds, facts: TensorFacts) -> Bounds | None:
    """Return bounds of integers, or None if some of them would overflow."""
    if facts.dtype.is_floating_point or facts.dtype.is_complex or facts.dtype is torch.bool:
        return None
    limits = torch.iinfo(facts.dtype)
    return found if limits.min <= found.low <= found.high <= limits.max else None


def _uniform(value: object, facts: TensorFacts) -> Bounds | None:
    if type(value) not in (bool, int, float) or facts.dtype.is_complex:
        return None
    try:
        held: Number = torch.tensor(value).to(facts.dtype).item()
    except RuntimeError:
        return None
    return Bounds(held, held)


def _converted(given: Bounds, facts: TensorFacts) -> Bounds | None:
    if given.value is not None:
        return _uniform(given.value, facts)
    # Bounds that differ are those of integers, which narrower dtypes wrap and floating-point ones round.
    return given if facts.dtype is torch.int64 else None
