"""Reads ``softmax(q @ k.T * scale + mask) @ v`` back from its softmax, in every form of graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fxopt_core import Refusal
from fxopt_rewrite import (
    DROPOUTS,
    GraphIndex,
    Operation,
    operands_of,
    read_operation,
    tensor_facts,
    words,
)
from fxopt_simplify.attention.masks import MaskValues

_ONE_NAME = {"bmm": "matmul", **dict.fromkeys(DROPOUTS, "dropout")}
_CASTS = words("to _to_copy type type_as float double")
_CHECK = "_assert_tensor_metadata"
_MOST_BETWEEN = 8


class Mask(NamedTuple):
    """A mask: added to the scores, or filled in where it is true.

    Attributes:
        value: the summand, or the boolean mask.
        fill: what is filled in; None for a summand.
        node: the call that reads it.
    """

    value: Node
    fill: object
    node: Node


@dataclass(frozen=True, eq=False)
class Scores:
    """``query @ keys * scale + masks``.

    Attributes:
        query: (..., L, E).
        keys: the transposed keys, (..., E, S).
        scale: the factor of the scores.
        masks: in the order in which they are applied.
        calls: all its calls, the last first.
    """

    query: Node
    keys: Node
    scale: float
    masks: tuple[Mask, ...]
    calls: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Attention:
    """``softmax(scores) @ value``.

    Attributes:
        scores: what the softmax takes.
        weights: the softmax, and the casts and dropouts after it.
        value: (..., S, V).
        product: the last call.
        values: what is known of the masks of its graph.
    """

    scores: Scores
    weights: tuple[Node, ...]
    value: Node
    product: Node
    values: MaskValues

    @property
    def label(self) -> str:
        """The name of the last call."""
        return self.product.name

    @property
    def between(self) -> tuple[Node, ...]:
        """All calls before the last one, the last of them first."""
        return (*self.weights[::-1], *self.scores.calls)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All calls, in the order of the graph."""
        return (*self.between[::-1], self.product)


class AttentionReader:
    """Reads the attentions of one graph."""

    def __init__(self, index: GraphIndex) -> None:
        self._index = index
        self._values = MaskValues(index)

    def read(self, softmax: Node) -> Attention | Refusal | None:
        """Read an attention by its softmax; a refusal for a near miss, None for any other node."""
        if self.name(softmax) != "softmax":
            return None
        weights = list(self._weights(softmax))
        found = next(((user, value) for user in weights[-1].users if (value := self._value(user, weights[-1]))), None)
        before = self._input(softmax)
        scores = None if found is None or before is None else self._scores(before)
        if found is None or scores is None:
            return None
        product, value = found
        whole = Attention(scores, tuple(weights), value, product, self._values)
        return self._refusal(softmax, weights, product) or self._whole(whole)

    def name(self, node: Node) -> str:
        """Return the name of what a node calls; "" where it is not known."""
        call = read_operation(self._index, node)
        return "" if call is None else _ONE_NAME.get(call.name, call.name)

    def readers(self, node: Node) -> list[Node]:
        """Return the users of a node without the checks of its dtype that an export inserts."""
        return [user for user in node.users if self.name(user) != _CHECK]

    def checks(self, node: Node) -> list[Node]:
        """Return the checks of a node's dtype."""
        return [user for user in node.users if self.name(user) == _CHECK]

    def _input(self, node: Node) -> Node | None:
        call = read_operation(self._index, node)
        return None if call is None else call.input

    def _weights(self, softmax: Node) -> Iterator[Node]:
        """Yield the softmax, and the casts and dropouts that follow it."""
        value: Node | None = softmax
        for _ in range(_MOST_BETWEEN):
            if value is None:
                return
            yield value
            names_of = {self.name(user): user for user in value.users}
            value = next((names_of[name] for name in ("dropout", *_CASTS) if name in names_of), None)

    def _value(self, user: Node, weights: Node) -> Node | None:
        """Return what the weights are multiplied with, if it is a node and they are the left factor."""
        operands = operands_of(user) if self.name(user) == "matmul" else ()
        if len(operands) != 2 or operands[0] is not weights:
            return None
        return operands[1] if isinstance(operands[1], Node) else None

    def _refusal(self, softmax: Node, weights: list[Node], product: Node) -> Refusal | None:
        call, facts = read_operation(self._index, softmax), tensor_facts(softmax)
        dim = None if call is None else call.arguments["dim"]
        if dim != -1 and (facts is None or dim != facts.rank - 1):
            message = f"node `{softmax.name}` is a softmax over dimension {dim}, and attention has it over the last one"
            return self._index.refuse(product.name, "other-attention", message, softmax, product)
        for node in weights:
            if self.name(node) == "dropout" and self._drops(node):
                message = f"dropout at node `{node.name}` drops weights of the attention"
                return self._index.refuse(product.name, "training", message, softmax, product)
        return None

    def _drops(self, node: Node) -> bool:
        call = read_operation(self._index, node)
        return call is None or (call.arguments["p"] not in (0, 0.0) and call.arguments["training"] is not False)

    def _whole(self, found: Attention) -> Attention | Refusal:
        """Refuse weights or scores that are also read elsewhere, as by ``output_attentions``."""
        for node in found.between:
            users = self.readers(node)
            other = next((user for user in users if user is not found.product and user not in found.between), None)
            if other is not None:
                message = f"node `{node.name}` of the attention is also used at node `{other.name}`, and would be gone"
                return self._index.refuse(found.label, "several-users", message, *found.nodes)
        return found

    def _scores(self, value: Node, depth: int = _MOST_BETWEEN) -> Scores | None:
        """Read ``query @ keys * scale + masks``; None for scores that attention does not have, such as capped ones."""
        name, source = self.name(value), self._input(value)
        if not depth:
            return None
        if name == "matmul":
            # A product with a parameter is a layer, whose result is not scores.
            nodes = [each for each in operands_of(value) if isinstance(each, Node) and each.op != "get_attr"]
            return Scores(nodes[0], nodes[1], 1.0, (), (value,)) if len(nodes) == 2 else None
        if name in ("add", "masked_fill") and not value.kwargs:
            return self._masked(value, name, depth - 1)
        if name in ("mul", "div") and not value.kwargs:
            return self._scaled(value, name, depth - 1)
        found = self._scores(source, depth - 1) if name in _CASTS and source is not None else None
        return None if found is None else _then(found, value)

    def _masked(self, value: Node, name: str, depth: int) -> Scores | None:
        operands: tuple[Any, ...] = value.args
        for scores, mask in [operands[:2], operands[1::-1]] if name == "add" else [operands[:2]]:
            found = self._scores(scores, depth) if isinstance(scores, Node) else None
            if found is not None:
                # ``mask.add_(scores)`` writes the mask, which may be read again.
                fits = isinstance(mask, Node) and mask not in self._index.effects.writes(value)
                fill = operands[2] if name == "masked_fill" else None
                return _then(found, value, masks=(*found.masks, Mask(mask, fill, value))) if fits else None
        return None

    def _scaled(self, value: Node, name: str, depth: int) -> Scores | None:
        operands: tuple[Any, ...] = value.args
        for scores, factor in [operands[:2], operands[1::-1]][: 1 if name == "div" else 2]:
            found = self._scores(scores, depth) if isinstance(scores, Node) else None
            if found is not None:
                is_number = type(factor) in (int, float) and factor > 0 and math.isfinite(factor)
                # A factor after a mask would scale the mask, too.
                if not is_number or found.masks:
                    return None
                return _then(found, value, scale=found.scale / factor if name == "div" else found.scale * factor)
        return None


def _then(found: Scores, node: Node, **changes: Any) -> Scores:
    return replace(found, calls=(node, *found.calls), **changes)


def is_last_transpose(call: Operation | None, rank: int) -> bool:
    """Return whether a call exchanges the last two dimensions."""
    if call is None or call.name not in ("mT", "permute", "transpose"):
        return False
    dims = call.arguments.get("dims", (call.arguments.get("dim0"), call.arguments.get("dim1")))
    places = [dim % rank for dim in dims if type(dim) is int] if isinstance(dims, tuple) else []
    if call.name == "permute":
        return places == [*range(rank - 2), rank - 1, rank - 2]
    return call.name == "mT" or set(places) == {rank - 2, rank - 1}


#: The dtypes in which scores that are written out are as exact as those inside of the kernel.
FLOATS = (torch.float32, torch.float64)
