"""Which masks leave every row of scores something to attend to.

Softmax over a row of ``-inf`` gives NaN, and ``scaled_dot_product_attention`` gives zeros there. A mask of finite
numbers is added to the scores by both: a row of the smallest number gives equal weights in both. So a mask
is accepted if all its elements are finite.

Values that are computed from parameters by layers, and products of matrices, count as finite and as small compared
with the largest number of their dtype. Inputs of the graph and buffers may hold anything.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import nn
from torch.fx import Node

from fxopt_rewrite import (
    GraphIndex,
    tensor_facts,
    words,
)
from fxopt_simplify.known_values import ANYTHING, Bounds, KnownValues
from fxopt_simplify.purity import SAME_ELEMENTS

_SAME_NUMBERS = SAME_ELEMENTS | words("index index_select gather to _to_copy type_as float double roll")
_COMPUTED = words("nn.Embedding embedding nn.Linear linear matmul bmm sigmoid nn.Sigmoid tanh nn.Tanh softmax")
_LONGEST = 64


#: Bounds of values so small that they do not count beside the largest number of a dtype.
_SMALL = Bounds(0.0, 0.0)


class MaskValues:
    """What is known of the values of a graph's masks."""

    def __init__(self, index: GraphIndex) -> None:
        self._index = index
        self._found: dict[Node, Bounds] = {}

    @cached_property
    def _known(self) -> KnownValues:
        return KnownValues(self._index)

    def number(self, value: object) -> float | None:
        """Return a literal number, or the value of all elements of a tensor where it is known."""
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        known = self._known.value(value)
        return None if known is None else float(known)

    def bounds(self, value: object, depth: int = _LONGEST) -> Bounds:
        """Return the bounds of all elements of a mask."""
        number = self.number(value)
        if number is not None or not isinstance(value, Node):
            return ANYTHING if number is None else Bounds(number, number)
        if value not in self._found:
            self._found[value] = self._read(value, depth - 1) if depth else ANYTHING
        return self._found[value]

    def _read(self, node: Node, depth: int) -> Bounds:
        facts, effect = tensor_facts(node), self._index.effects.effect(node)
        if isinstance(self._index.attribute_of(node), nn.Parameter) or effect.operation in _COMPUTED:
            return ANYTHING if self._changes(node) else _SMALL
        if facts is not None and facts.dtype is torch.bool:
            return Bounds(0.0, 1.0)
        if self._changes(node) or facts is None or not facts.dtype.is_floating_point:
            return ANYTHING
        found = self._operation(node, effect.operation or "", depth)
        return found if found.fit(facts.dtype) or found.high <= 0 else ANYTHING

    def _changes(self, node: Node) -> bool:
        """Return whether a call may write, or its result may be written later."""
        effect = self._index.effects.effect(node)
        written = self._index.effects.written_between(node, node, self._index.nodes[-1])
        return effect.opaque or bool(effect.writes) or written

    def _operation(self, node: Node, name: str, depth: int) -> Bounds:
        operands = [self.bounds(each, depth) for each in node.args[:3]]
        if name in _SAME_NUMBERS and operands:
            return operands[0]
        if name in ("where", "masked_fill") and len(operands) == 3 and not node.kwargs:
            return (operands[1] if name == "where" else operands[0]) | operands[2]
        if name in ("tril", "triu") and operands:
            # The other triangle is zeros.
            return operands[0] | _SMALL
        if len(node.args) != 2 or node.kwargs:
            return ANYTHING
        first, second = operands
        if name in ("sub", "rsub"):
            first, second = (first, second) if name == "sub" else (second, first)
            return first.plus(Bounds(-second.high, -second.low))
        return first.plus(second) if name == "add" else first.times(second) if name == "mul" else ANYTHING
