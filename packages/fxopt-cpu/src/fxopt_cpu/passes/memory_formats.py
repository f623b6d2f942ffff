"""How operations treat the memory format of their input, and which values may be channels last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
from torch import SymInt
from torch.fx import Node

from fxopt_cpu.layers.packed_conv import PackedConv2d
from fxopt_cpu.layers.thawing import Layer
from fxopt_rewrite import (
    GraphIndex,
    TensorFacts,
    aten_overloads,
    is_python_number,
    read_operation,
    same_size,
    strides_in,
    tensor_facts,
    words,
)

#: Operations whose values do not depend on the strides of the input, but whose strides do, beside the pointwise ones.
#:
#: Those on images give them the memory format of their input.
_FOLLOWING = words(
    """
    hardswish log_sigmoid prelu softsign tanhshrink nn.PReLU nn.Softsign nn.Tanhshrink nn.CELU nn.Hardshrink
    nn.Softshrink nn.Threshold float double half bfloat16 to _to_copy identity
    adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d avg_pool2d batch_norm cat conv2d convolution
    _convolution conv_transpose2d interpolate max_pool2d max_pool2d_with_indices pad pixel_shuffle pixel_unshuffle
    softmax _softmax upsample_bilinear2d upsample_nearest2d upsample_bicubic2d nn.AdaptiveMaxPool2d nn.PixelShuffle
    nn.PixelUnshuffle nn.ReflectionPad2d nn.ReplicationPad2d nn.Softmax2d nn.Upsample nn.UpsamplingBilinear2d
    nn.UpsamplingNearest2d
    permute transpose movedim mT select narrow slice chunk split tensor_split getitem unbind unsqueeze squeeze expand
    expand_as broadcast_to flatten reshape mean sum amax amin adaptive_avg_pool1d var_mean
    """
)

#: Operations that return a view or a copy, depending on strides.
_MAY_COPY = frozenset({"flatten", "reshape", "contiguous", "to"})

#: Operations whose result has the same strides for any strides of the input.
_CHOOSES_STRIDES = words("linear addmm layer_norm native_layer_norm contiguous matmul mm bmm")

_READS_SIZES = words("size sym_size shape dim ndim numel nelement sym_numel dtype device new_full new_ones new_zeros")


#: Operations on images whose result is channels last if all the images are, beside the pointwise ones.
_KEEPS_FORMAT = words("batch_norm cat max_pool2d avg_pool2d")


@cache
def _is_pointwise(name: str) -> bool:
    return any(torch.Tag.pointwise in overload.tags for overload in aten_overloads(name))


def leave_channels_last(index: GraphIndex) -> Iterable[Node]:
    """Let convolutions leave their results channels last where every reader computes the same from it.

    A view that would become a copy does not if the viewed value is written later. Linear in the graph.

    Returns:
        The nodes whose strides change.
    """
    free = hidden_strides(index)
    changed: dict[Node, None] = {}
    for node in free:
        module = index.module_of(node)
        if isinstance(module, PackedConv2d) and module.dims == 2 and module.memory_format != "channels_last":
            module.memory_format = "channels_last"
            changed[node] = None
    waiting = list(changed)
    while waiting:
        node = waiting.pop()
        new = [user for user in node.users if user not in changed and follows_strides(node, user, index)]
        changed.update(dict.fromkeys(new))
        waiting += new
    return changed


def hidden_strides(index: GraphIndex) -> set[Node]:
    """Return the values with whose strides neither results nor their strides change. Linear in the graph."""
    free: set[Node] = set()
    for node in reversed(index.nodes):
        follows = {user: follows_strides(node, user, index) for user in node.users}
        if all(each is False or (each and user in free) for user, each in follows.items()):
            free.add(node)
    return free


def shows_strides(node: Node, hidden: Callable[[], set[Node]]) -> bool:
    """Return whether a value is known not to be contiguous, and results or their strides depend on its strides."""
    facts = tensor_facts(node)
    if facts is None or facts.stride is None or has_strides(facts, strides_in("contiguous", facts.shape)):
        return False
    return node not in hidden()


def follows_strides(value: Node, user: Node, index: GraphIndex) -> bool | None:
    """Return whether a reader's strides follow from those of a value; None if more than its strides may."""
    module = index.module_of(user)
    if isinstance(module, PackedConv2d):
        return module.memory_format == "preserve"
    if isinstance(module, Layer):
        return False
    if user.op == "output":
        return None
    effect, plain = index.effects.effect(user), _name_of(index, user)
    reads = user.args[1] if user.target is getattr else effect.operation
    if reads in _READS_SIZES or (user.op == "call_function" and is_python_number(user)):
        return False
    if plain in _MAY_COPY and index.effects.written_between(value, user, index.nodes[-1]):
        return None
    if plain in _CHOOSES_STRIDES or user.kwargs.get("memory_format") is torch.contiguous_format:
        return None if effect.writes else False
    # The lists name what is allowed: any other operation may compute something else from other strides.
    return True if plain in _FOLLOWING or _is_pointwise(plain) else None


def _name_of(index: GraphIndex, node: Node) -> str:
    call = read_operation(index, node)
    return call.name if call is not None else index.effects.effect(node).operation or ""


def follows_images(index: GraphIndex, node: Node) -> bool:
    """Return whether a value whose strides change is certainly channels last, as all images that it is made of are."""
    facts, module = tensor_facts(node), index.module_of(node)
    if facts is None or facts.rank != 4 or is_ambiguous(facts):
        return False
    if isinstance(module, PackedConv2d):
        return module.memory_format == "channels_last"
    name, images = _name_of(index, node), node.all_input_nodes
    if name in _KEEPS_FORMAT:
        images = [each for each in images if each.op != "get_attr"]  # vectors
    elif not _is_pointwise(name):
        return False
    return all(format_of(each) == "channels_last" for each in images)


def is_ambiguous(facts: TensorFacts) -> bool:
    """Return whether both memory formats have the same order: always one channel, or always one element per channel.

    >>> import torch
    >>> is_ambiguous(TensorFacts((2, 1, 8, 8), torch.float32, proven=True))
    True
    """
    if facts.rank != 4 or not facts.proven:
        return False
    return _is_one(facts.shape[1]) or (_is_one(facts.shape[2]) and _is_one(facts.shape[3]))


def format_of(node: Node) -> str | None:
    """Return the known memory format of a value: "contiguous", "channels_last", or None."""
    if node.kwargs.get("memory_format") is torch.channels_last:  # its facts describe its input
        return "channels_last"
    facts = tensor_facts(node)
    if facts is None or facts.stride is None:
        return None
    if has_strides(facts, strides_in("contiguous", facts.shape)):
        return "contiguous"
    is_last = facts.rank == 4 and has_strides(facts, strides_in("channels_last", facts.shape))
    return "channels_last" if is_last else None


def has_strides(facts: TensorFacts, expected: Sequence[int | SymInt]) -> bool:
    """Return whether a tensor is known to have these strides, but for those of dimensions of one element."""
    return facts.stride is not None and all(
        _is_one(size) or same_size(*each) for size, *each in zip(facts.shape, facts.stride, expected, strict=True)
    )


def _is_one(size: int | SymInt) -> bool:
    return isinstance(size, int) and size == 1
