"""Operations next to a layer that oneDNN can compute with it: padding before it, a sum and an activation after it."""

from __future__ import annotations

from typing import NamedTuple

from torch.fx import Node

from fxopt_cpu.layers.epilogue import NONE, Activation, activation_named
from fxopt_cpu.layers.packed_conv import Pair
from fxopt_cpu.passes.matching import sole_user
from fxopt_rewrite import ActivationCall, ElementwiseCall, GraphIndex, read_activation, read_elementwise, read_operation


class Sum(NamedTuple):
    """The sum of a layer's result and another value.

    Attributes:
        node: the addition.
        other: the other value.
    """

    node: Node
    other: Node


class Padding(NamedTuple):
    """Zeros around the last two dimensions.

    Attributes:
        node: the call.
        input: the value that is padded.
        sides: numbers of rows before and after, and of columns before and after.
    """

    node: Node
    input: Node
    sides: tuple[Pair, Pair]


def activation_after(index: GraphIndex, node: Node) -> tuple[Node, Activation]:
    """Return the activation of a value that nothing else reads, with its node; else the node itself and `NONE`.

    Modules have to be torch's own, without hooks. In-place forms count too: they overwrite the result of the layer.
    """
    user = sole_user(node)
    call = None if user is None else read_activation(index, user)
    if user is None or not isinstance(call, ActivationCall) or call.input is not node:
        return node, NONE
    activation = activation_named(call.name, call.settings)
    if activation is None or index.effects.written_between(node, node, user):
        return node, NONE
    return user, activation


def sum_after(index: GraphIndex, node: Node) -> Sum | None:
    """Return the addition of another tensor to a value that nothing else reads.

    ``other.add_(value)`` does not count, since it writes into the other tensor.
    """
    user = sole_user(node)
    call = None if user is None else read_elementwise(user)
    if user is None or not isinstance(call, ElementwiseCall) or call.operation != "add" or call.alpha != 1:
        return None
    first, second = call.left, call.right
    if not isinstance(first, Node) or not isinstance(second, Node) or first is second:
        return None
    if (call.inplace and first is not node) or index.effects.written_between(node, node, user):
        return None
    return Sum(user, second if first is node else first)


def padding_before(index: GraphIndex, node: Node) -> Padding | None:
    """Return the zero padding that a node computes, if only one node reads the result."""
    operation = read_operation(index, node)
    if operation is None or operation.name != "pad" or operation.input is None or sole_user(node) is None:
        return None
    arguments = operation.arguments
    zeros = arguments["mode"] == "constant" and arguments["value"] in (None, 0)
    sides = _as_sides(arguments.get("pad")) if zeros else None
    return None if sides is None else Padding(node, operation.input, sides)


def _as_sides(pad: object) -> tuple[Pair, Pair] | None:
    """Return torch's padding, last dimension first, as sides of rows and of columns."""
    if not isinstance(pad, tuple) or len(pad) not in (2, 4):
        return None
    # A negative size crops, which a convolution cannot do.
    sizes = [size for size in (*pad, 0, 0)[:4] if isinstance(size, int) and size >= 0]
    if len(sizes) < 4:
        return None
    left, right, top, bottom = sizes
    return (top, bottom), (left, right)
