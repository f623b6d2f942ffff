"""How operations treat the memory format of their input, and which values may be channels last."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import SymInt
from torch.fx import Node

from fxopt_cpu.layers.packed_conv import PackedConv2d
from fxopt_cpu.layers.thawing import Layer
from fxopt_rewrite import GraphIndex, TensorFacts, is_python_number, same_size, tensor_facts

_ELEMENTWISE = """
abs acos add addcdiv addcmul asin atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu clamp clamp_max
clamp_min clip clone copysign cos cosh deg2rad div divide elu eq erf erfc erfinv exp exp2 expm1 floor fmax fmin fmod
frac ge gelu gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot isfinite isinf isnan le leaky_relu lerp
log log10 log1p log2 log_sigmoid logical_and logical_not logical_or logical_xor logit logsigmoid lt maximum minimum
mish mul multiply nan_to_num ne neg negative pow prelu rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu
sigmoid sign sin sinh softplus softshrink softsign sqrt square sub subtract tan tanh tanhshrink threshold true_divide
trunc where silu float double half bfloat16 to _to_copy masked_fill
nn.CELU nn.ELU nn.GELU nn.Hardshrink nn.Hardsigmoid nn.Hardswish nn.Hardtanh nn.LeakyReLU nn.LogSigmoid nn.Mish
nn.PReLU nn.ReLU nn.ReLU6 nn.SELU nn.SiLU nn.Sigmoid nn.Softplus nn.Softshrink nn.Softsign nn.Tanh nn.Tanhshrink
nn.Threshold nn.Identity identity
"""
_PLANES = """
adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d avg_pool2d batch_norm cat concat concatenate
constant_pad_nd conv2d convolution _convolution conv_transpose2d interpolate max_pool2d max_pool2d_with_indices pad
pixel_shuffle pixel_unshuffle softmax _softmax upsample_bilinear2d upsample_nearest2d upsample_bicubic2d
nn.AdaptiveAvgPool2d nn.AdaptiveMaxPool2d nn.AvgPool2d nn.BatchNorm2d nn.ConstantPad2d nn.Conv2d nn.ConvTranspose2d
nn.MaxPool2d nn.PixelShuffle nn.PixelUnshuffle nn.ReflectionPad2d nn.ReplicationPad2d nn.Softmax2d nn.Upsample
nn.UpsamplingBilinear2d nn.UpsamplingNearest2d nn.ZeroPad2d
"""
_MOVES = """
permute transpose movedim moveaxis swapaxes swapdims mT select narrow slice chunk split split_with_sizes tensor_split
getitem unbind unsqueeze squeeze expand expand_as broadcast_to flatten reshape mean sum amax amin nn.Flatten
adaptive_avg_pool1d max min var_mean
"""
PRESERVES_FORMAT = frozenset(_ELEMENTWISE.split()) | frozenset(_PLANES.split())
"""Operations on images whose result has the memory format of its input."""

CHANGES_STRIDES = frozenset(_MOVES.split())
"""Operations whose values do not depend on the strides of the input, but whose strides do."""

MAY_COPY = frozenset({"flatten", "reshape", "nn.Flatten", "contiguous", "to"})
"""Operations that return a view or a copy, depending on strides."""

CHOOSES_STRIDES = {"linear", "nn.Linear", "addmm", "layer_norm", "nn.LayerNorm", "native_layer_norm", "contiguous"}
CHOOSES_STRIDES |= {"matmul", "mm", "bmm"}
"""Operations whose result has the same strides for any strides of the input."""

_READS_SIZES = frozenset(
    ["size", "sym_size", "shape", "dim", "ndim", "numel", "nelement", "sym_numel", "dtype", "device"]
)


def reads_sizes(node: Node, operation: str | None) -> bool:
    """Return whether a node only reads sizes, dtype or device."""
    return (node.args[1] if node.target is getattr else operation) in _READS_SIZES


def leave_channels_last(index: GraphIndex) -> Iterable[Node]:
    """Let convolutions leave their results channels last where every reader computes the same from it.

    A view that would become a copy does not if the viewed value is written later. Linear in the graph.

    Returns:
        The nodes whose strides change.
    """
    free: set[Node] = set()  # what may be channels last
    followers: dict[Node, list[Node]] = {}  # whose strides follow from those of a value
    changed: dict[Node, None] = {}
    for node in reversed(index.nodes):
        follows = {user: _follows(node, user, index) for user in node.users}
        followers[node] = [user for user, each in follows.items() if each]
        if None in follows.values() or not free.issuperset(followers[node]):
            continue
        free.add(node)
        module = index.module_of(node)
        if isinstance(module, PackedConv2d) and module.dims == 2 and module.memory_format != "channels_last":
            module.memory_format = "channels_last"
            changed[node] = None
    waiting = list(changed)
    while waiting:
        new = [user for user in followers[waiting.pop()] if user not in changed]
        changed.update(dict.fromkeys(new))
        waiting += new
    return changed


def _follows(value: Node, user: Node, index: GraphIndex) -> bool | None:
    """Return whether a reader's strides follow from those of a value; None if more than its strides may."""
    module = index.module_of(user)
    if isinstance(module, PackedConv2d):
        return module.memory_format == "preserve"
    if isinstance(module, Layer):
        return False
    if user.op == "output":
        return None
    effect = index.effects.effect(user)
    plain = None if effect.operation is None else effect.operation.removesuffix("_")
    if reads_sizes(user, effect.operation) or (user.op == "call_function" and is_python_number(user)):
        return False
    if plain in MAY_COPY and index.effects.written_between(value, user, index.nodes[-1]):
        return None
    if plain in CHOOSES_STRIDES:
        return None if effect.writes else False
    return True if plain in PRESERVES_FORMAT or plain in CHANGES_STRIDES else None


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
    if _has_strides(facts, tuple(range(facts.rank))):
        return "contiguous"
    return "channels_last" if facts.rank == 4 and _has_strides(facts, (0, 2, 3, 1)) else None


def _has_strides(facts: TensorFacts, order: tuple[int, ...]) -> bool:
    """Return whether strides are dense, with dimensions in this order, the last one innermost."""
    assert facts.stride is not None
    expected: int | SymInt = 1
    for dim in reversed(order):
        if not _is_one(facts.shape[dim]) and not same_size(facts.stride[dim], expected):
            return False
        expected = expected * facts.shape[dim]
    return True


def _is_one(size: int | SymInt) -> bool:
    return isinstance(size, int) and size == 1
