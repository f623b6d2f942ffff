"""Batch norms that are written out, as ``FrozenBatchNorm2d`` of detection models: ``x * scale + shift``.

``scale = weight / sqrt(variance + eps)`` and ``shift = bias - mean * scale`` are computed in every call, from buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.fx import Node

from fxopt_rewrite import (
    BatchNormCall,
    GraphIndex,
    Match,
    Obstacle,
    Pattern,
    TensorFacts,
    TensorRef,
    owner_of,
    read_call,
    tensor_facts,
    tensor_ref,
)

_VIEWS = {"view", "reshape", "unsqueeze", "contiguous", "detach", "alias"}
_CASTS = {"to", "_to_copy", "float", "half", "bfloat16"}
_COMPUTES = {"add", "sub", "rsub", "mul", "div", "sqrt", "rsqrt", "reciprocal"}
#: How many nodes may compute a scale or shift: this is tried at every sum, and chains may be long.
_MOST_NODES = 32


@dataclass(frozen=True, eq=False, slots=True)
class WrittenBatchNorm(BatchNormCall):
    """``input * scale + shift``; its node is the sum.

    Attributes:
        parts: the calls that compute it, except the sum, in order; the last is the product.
        factors: what is known of scale and shift.
    """

    parts: tuple[Node, ...]
    factors: tuple[TensorFacts, TensorFacts]


def _norm(
    x: Tensor, weight: nn.Parameter, bias: nn.Parameter, mean: nn.Parameter, variance: nn.Parameter, eps: float
) -> Tensor:
    scale = weight / torch.sqrt(variance + eps)
    return x * scale + (bias - mean * scale)


def read_written_batch_norm(index: GraphIndex, node: Node) -> tuple[Node, WrittenBatchNorm | Obstacle] | None:
    """Read ``x * scale + shift`` with a scale that the graph computes only from registered tensors.

    Returns:
        ``x``, and the batch norm, or an obstacle where scale and shift are not those of a batch norm.
    """
    affine = next(_patterns()[0].matches(index, node), None)
    return None if affine is None else (affine.values["x"], _read(index, node, affine))


def _read(index: GraphIndex, node: Node, affine: Match) -> WrittenBatchNorm | Obstacle:
    value, scale, shift = affine.values["x"], affine.values["scale"][-1], affine.values["shift"][-1]
    # Of all matches, the one with this value as `x`: in a product, another factor may match `x` too.
    found = next((match for match in _patterns()[1].matches(index, node) if match.values["x"] is value), None)
    if found is None:
        message = f"`{scale.name}` and `{shift.name}`, scale and shift of node `{node.name}`, are computed, but not as"
        formula = "weight / sqrt(variance + eps) and bias - mean * scale"
        return Obstacle(node.name, "computed-weight", f"{message} {formula} of a batch norm")
    refs: list[TensorRef | None] = []
    for key in ("weight", "bias", "mean", "variance"):
        ref = tensor_ref(index, node, found.values[key], "tensor", parameter=False)
        if isinstance(ref, Obstacle):
            return ref
        if ref is not None and ref.key in index.modules[owner_of(ref.name)]._non_persistent_buffers_set:
            return Obstacle(node.name, "not-a-parameter", f"`{ref.name}` is a buffer that checkpoints do not hold")
        refs.append(ref)
    if (other := found.other_reader()) is not None:
        message = f"`{other[0].name}`, a part of the batch norm at `{node.name}`, is also used at node"
        return Obstacle(node.name, "several-users", f"{message} `{other[1].name}`")
    constants = sorted({*affine.values["scale"], *affine.values["shift"]}, key=index.position.__getitem__)
    factors = _factors(constants, scale, shift)
    if factors is None:
        message = f"the batch norm that ends at node `{node.name}` has tensors of different or unknown sizes"
        return Obstacle(node.name, "unsupported-call", message)
    weight, bias, mean, variance = refs
    calls = (*(each for each in found.nodes if each not in affine.nodes), affine.nodes[0])
    owner, eps = owner_of(found.values["variance"].name), float(found.values["eps"])
    return WrittenBatchNorm(
        node, value, weight, bias, None, owner, False, mean, variance, None, eps, (), calls, factors
    )


def _constants(index: GraphIndex, value: Node) -> list[Node] | None:
    """Return the nodes that compute a value only from registered tensors, in order; else None, also for many nodes."""
    found: set[Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        call = read_call(node)
        known = call is not None and call.name in _VIEWS | _CASTS | _COMPUTES and not call.inplace
        if call is not None and call.name == "view" and "dtype" in call.arguments:  # the same bits as other numbers
            return None
        if len(found) > _MOST_NODES or not (known or index.tensor_of(node) is not None):
            return None
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return sorted(found, key=index.position.__getitem__)


def _computed(index: GraphIndex, value: Node) -> list[Node] | None:
    """Return such nodes if one of them computes more than a view of a tensor."""
    found = _constants(index, value)
    computes = any((call := read_call(node)) is not None and call.name in _COMPUTES for node in found or ())
    return found if computes else None


def _factors(constants: list[Node], scale: Node, shift: Node) -> tuple[TensorFacts, TensorFacts] | None:
    """Return what is known of scale and shift; None unless all their inputs lie along one dimension."""
    facts = {node: found for node in constants if (found := tensor_facts(node)) is not None}
    # The product of a shape equals its maximum if all other sizes are one.
    sizes = {size for each in facts.values() for size in (prod(each.shape), max(each.shape, default=0))}
    plain = len(sizes) == 1 and all(each.dtype.is_floating_point for each in facts.values())
    return (facts[scale], facts[shift]) if plain and len(facts) == len(constants) else None


@cache
def _patterns() -> tuple[Pattern, ...]:
    """Return the patterns of a product and a sum with constants, and of a batch norm."""
    kinds = {"scale": Annotated[list[Node], _computed], "shift": Annotated[list[Node], _constants]}
    return Pattern(lambda x, scale, shift: x * scale + shift, kinds=kinds), Pattern(_norm, through=_VIEWS | _CASTS)
