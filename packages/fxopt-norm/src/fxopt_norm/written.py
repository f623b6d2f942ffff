"""Batch norms that are written out, as ``FrozenBatchNorm2d`` of detection models: ``x * scale + shift``.

``scale = weight / sqrt(variance + eps)`` and ``shift = bias - mean * scale`` are computed in every call, of buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fxopt_rewrite import (
    BatchNormCall,
    ElementwiseCall,
    GraphIndex,
    Obstacle,
    TensorRef,
    owner_of,
    read_call,
    read_elementwise,
    tensor_ref,
)

_VIEWS = {"view", "reshape", "unsqueeze", "contiguous", "detach", "alias"}
_CASTS = {"to", "_to_copy", "float", "half", "bfloat16"}
_COMPUTES = {"add", "sub", "rsub", "mul", "div", "sqrt", "rsqrt", "reciprocal"}
_CHECK = "_assert_tensor_metadata"  # of a dtype, before a cast
_MOST_NODES = 32


@dataclass(frozen=True, eq=False, slots=True)
class WrittenBatchNorm(BatchNormCall):
    """``input * scale + shift``; its node is the sum.

    Attributes:
        parts: the calls that compute it, but for the sum, in order; the last is the product.
        factors: scale and shift, on the meta device.
    """

    parts: tuple[Node, ...]
    factors: tuple[Tensor, Tensor]


def read_written_batch_norm(index: GraphIndex, node: Node) -> tuple[Node, WrittenBatchNorm | Obstacle] | None:
    """Read ``x * scale + shift`` with a scale that the graph computes of registered tensors alone.

    Returns:
        ``x``, and the batch norm, or an obstacle where scale and shift are not those of a batch norm.
    """
    for product, shift in _operands(node, "add"):
        for value, scale in _operands(product, "mul"):
            if isinstance(value, Node) and isinstance(scale, Node) and isinstance(shift, Node):
                constants = _constants(index, scale, shift)
                if constants is not None and _name(scale) is None:
                    assert isinstance(product, Node)
                    return value, _read(index, node, value, (product, scale, shift), constants)
    return None


def _read(
    index: GraphIndex, node: Node, value: Node, parts: tuple[Node, Node, Node], constants: list[Node]
) -> WrittenBatchNorm | Obstacle:
    product, scale, shift = parts
    found = _scale(scale)
    bias, rest = next(_operands(_bare(shift), "sub"), (None, None))
    means = (_name(mean) for mean, factor in _operands(_bare(rest), "mul") if _scale(factor) == found)
    names = _name(bias), next(means, None)
    if found is None or None in names:
        message = f"`{scale.name}` and `{shift.name}`, scale and shift of node `{node.name}`, are computed, and not as"
        formula = "weight / sqrt(variance + eps) and bias - mean * scale"
        return Obstacle(node.name, "computed-weight", f"{message} {formula} of a batch norm")
    refs: list[TensorRef | None] = []
    for name in (found[0], *names, found[1]):
        read = None if name is None else index.attribute_nodes(name)[0]
        ref = tensor_ref(index, node, read, "tensor", parameter=False)
        if isinstance(ref, Obstacle):
            return ref
        if ref is not None and ref.key in index.modules[owner_of(ref.name)]._non_persistent_buffers_set:
            return Obstacle(node.name, "not-a-parameter", f"`{ref.name}` is a buffer that checkpoints do not hold")
        refs.append(ref)
    computed = {each for each in constants if each.op != "get_attr"}
    computed |= {user for each in constants for user in each.users if _argument(user, _CHECK) is each}
    calls = (*sorted(computed, key=index.position.__getitem__), product)
    for part in calls:
        other = next((user for user in part.users if user is not node and user not in calls), None)
        if other is not None:
            message = f"`{part.name}`, a part of the batch norm at `{node.name}`, is also used at node `{other.name}`"
            return Obstacle(node.name, "several-users", message)
    factors = _factors(index, constants, scale, shift)
    if factors is None:
        message = f"the batch norm that node `{node.name}` ends has tensors of several sizes, dimensions or devices"
        return Obstacle(node.name, "unsupported-call", message)
    owner, (weight, offset, mean, var) = owner_of(found[1]), refs
    return WrittenBatchNorm(
        node, value, weight, offset, None, owner, False, mean, var, None, found[2], (), calls, factors
    )


def _operands(node: object, operation: str) -> Iterator[tuple[object, object]]:
    """Yield the operands of arithmetic that works out of place; those of sums and products in both orders."""
    call = read_elementwise(node) if isinstance(node, Node) else None
    if not isinstance(call, ElementwiseCall) or call.operation != operation or call.inplace:
        return
    if call.alpha == 1 and call.rounding_mode is None:
        yield call.left, call.right
        if operation in ("add", "mul"):
            yield call.right, call.left


def _bare(value: object) -> object:
    """Return the value that views and casts were made of."""
    while isinstance(value, Node) and (call := read_call(value)) is not None and call.name in _VIEWS | _CASTS:
        value = call.input
    return value


def _name(value: object) -> str | None:
    """Return the name of the tensor that a node reads, or that it is a view of."""
    node = _bare(value)
    return str(node.target) if isinstance(node, Node) and node.op == "get_attr" else None


def _scale(value: object) -> tuple[str | None, str, float] | None:
    """Return the names of weight and variance, and eps, of ``weight / sqrt(variance + eps)``."""
    node = _bare(value)
    for factor, inverse in _operands(node, "mul"):
        inner = _scale(inverse)
        if inner is not None and inner[0] is None and (factor == 1 or _name(factor) is not None):
            return _name(factor), *inner[1:]
    factor, root = next(_operands(node, "div"), (1, _argument(node, "reciprocal")))
    total = _argument(node, "rsqrt") or _argument(_bare(root), "sqrt")
    for variance, eps in _operands(_bare(total), "add"):
        name = _name(variance)
        if name is not None and isinstance(eps, float | int) and (factor == 1 or _name(factor) is not None):
            return _name(factor), name, float(eps)
    return None


def _argument(node: object, operation: str) -> Node | None:
    """Return what an operation works on; None if the node is another one."""
    call = read_call(node) if isinstance(node, Node) else None
    return call.input if call is not None and call.name == operation else None


def _constants(index: GraphIndex, *values: Node) -> list[Node] | None:
    """Return the nodes that compute values of registered tensors alone, in order; None for others, and for many."""
    found: set[Node] = set()
    waiting = list(values)
    while waiting:
        node = waiting.pop()
        call = read_call(node)
        known = call is not None and call.name in _VIEWS | _CASTS | _COMPUTES and not call.inplace
        if len(found) > _MOST_NODES or not (known or index.tensor_of(node) is not None):
            return None
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return sorted(found, key=index.position.__getitem__)


def _factors(index: GraphIndex, constants: list[Node], scale: Node, shift: Node) -> tuple[Tensor, Tensor] | None:
    """Return scale and shift on the meta device; None unless all that they are made of lies along one dimension."""
    values: dict[Node, Tensor] = {}
    for node in constants:
        call, tensor = read_call(node), index.tensor_of(node)
        if tensor is not None:
            values[node] = tensor.detach().to("meta")
        if call is None:
            continue
        refused = (str, torch.device, *((torch.dtype,) if call.name == "view" else ()))  # other numbers, same bits
        if any(isinstance(each, refused) for each in call.arguments.values()):
            return None
        args: Any = map_arg(node.args, values.__getitem__)
        kwargs: Any = map_arg(node.kwargs, values.__getitem__)
        function: Any = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
        values[node] = function(*args, **kwargs)
    sizes = {size for value in values.values() for size in (value.numel(), max(value.shape, default=0))}
    plain = len(sizes) == 1 and all(value.is_floating_point() for value in values.values())
    return (values[scale], values[shift]) if plain else None
