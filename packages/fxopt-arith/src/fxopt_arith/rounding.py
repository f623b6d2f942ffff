"""Which values are rounded, compared or turned into integers later, so that their last bit matters."""

from __future__ import annotations

import torch
from torch.fx import Node

from fxopt_core import GraphIndex, tensor_facts


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ROUNDING = _names(
    """
    floor ceil round trunc fix frac fmod mod remainder floor_divide floordiv ifloordiv imod divmod sign sgn heaviside
    eq ne lt le gt ge greater greater_equal less less_equal not_equal equal is_ is_not contains isclose allclose isin
    argmax argmin argsort sort msort topk kthvalue median nanmedian mode searchsorted bucketize histc histogram unique
    unique_consecutive nonzero argwhere count_nonzero logical_and logical_or logical_xor logical_not not_ truth
    int bool long short char byte item tolist numpy index __int__ __bool__ __index__ __floor__ __ceil__ __round__
    __trunc__ int_repr quantize_per_tensor quantize_per_channel fake_quantize_per_tensor_affine
    fake_quantize_per_channel_affine one_hot embedding bernoulli multinomial poisson arange range
    nn.Embedding nn.EmbeddingBag
    """
)
"""Operations that round, compare or cast to integers, or whose result tells the order of values."""

MIXING = _names(
    """
    matmul imatmul __matmul__ mm bmm mv dot vdot addmm addbmm addmv baddbmm einsum tensordot linear bilinear
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution softmax log_softmax softmin
    gumbel_softmax logsumexp layer_norm batch_norm group_norm instance_norm rms_norm normalize norm linalg_norm
    local_response_norm scaled_dot_product_attention multi_head_attention_forward
    nn.Linear nn.Bilinear nn.Conv1d nn.Conv2d nn.Conv3d nn.ConvTranspose1d nn.ConvTranspose2d nn.ConvTranspose3d
    nn.Softmax nn.Softmax2d nn.LogSoftmax nn.Softmin nn.LayerNorm nn.GroupNorm nn.RMSNorm nn.LocalResponseNorm
    nn.BatchNorm1d nn.BatchNorm2d nn.BatchNorm3d nn.InstanceNorm1d nn.InstanceNorm2d nn.InstanceNorm3d
    nn.MultiheadAttention nn.LSTM nn.GRU nn.RNN nn.LSTMCell nn.GRUCell nn.RNNCell
    """
)
"""Operations that sum products of many values, or normalise: behind them a last bit has no meaning of its own."""

SHAPE_ONLY = _names(
    """
    size shape dim ndim ndimension numel nelement stride dtype device layout is_floating_point is_complex requires_grad
    zeros_like ones_like empty_like rand_like randn_like new_zeros new_ones new_empty len isinstance
    """
)
"""Operations that read only the shape or the dtype of what they are given."""

CASTING_WRITES = _names("setitem __setitem copy")
"""Writes that convert to the dtype of what they write to."""

CASTS = _names("to type type_as _to_copy")
"""Conversions whose dtype may be told by another value."""

SELECTING = _names("getitem __getitem")
"""Selections: what they are given to select by is compared, so to speak."""

_CALLS = ("call_function", "call_method", "call_module")
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


class RoundedValues:
    """Finds, for every node, a later one that rounds or compares what it computes; linear in the size of the graph.

    The search goes through all operations but those that mix many values (matrix products, softmax, normalisations),
    and through memory that is written in place. What an opaque call does is not known, so it counts as rounding.
    """

    def __init__(self, index: GraphIndex) -> None:
        effects = {node: index.effects.effect(node) for node in index.nodes}
        memory: dict[Node, Node] = {}
        for node, effect in effects.items():
            alias = None if effect.opaque else next(iter(effect.aliases), None)
            memory[node] = node if alias is None else memory[alias]
        rounded: dict[Node, Node] = {}
        self._by: dict[Node, Node] = {}
        for node, effect in reversed(effects.items()):
            targets = [memory[node], *(memory[written] for written in effect.writes)]
            later = next((rounded[value] for value in targets if value in rounded), None)
            if later is not None:
                self._by[node] = later
            name = None if effect.opaque else effect.operation
            for value in node.all_input_nodes:
                source = node if _rounds(node, name, value) else None if _stops(node, name) else later
                if source is not None:
                    rounded.setdefault(memory[value], source)

    def by(self, node: Node) -> Node | None:
        """Return a node that rounds or compares the value of a node later, or None."""
        return self._by.get(node)


def _rounds(node: Node, name: str | None, value: Node) -> bool:
    """Return whether a call of the operation ``name`` may round, compare or convert to integers one of its inputs."""
    if node.op not in _CALLS:
        return False
    if name is None or node.kwargs.get("rounding_mode") is not None:
        return True
    bare = _bare(name)
    if bare in SHAPE_ONLY:
        return False
    if name in ROUNDING or bare in ROUNDING:
        return True
    if bare in CASTING_WRITES:
        return _may_hold_integers(node.args[0])
    if bare in SELECTING:
        return value is not node.args[0]
    if bare in CASTS:
        return _casts_to_integers(node)
    facts = tensor_facts(node)
    return facts is not None and facts.dtype in _INTEGERS and _is_floating(value)


def _stops(node: Node, name: str | None) -> bool:
    """Return whether a last bit has no meaning behind a call."""
    bare = _bare(name or "")
    return node.op not in _CALLS or bare in MIXING or bare in SHAPE_ONLY


def _bare(name: str) -> str:
    """Return the name of an operation, whether it works in place or stands in ``torch.special``."""
    return name.removeprefix("special_").rstrip("_")


def _casts_to_integers(node: Node) -> bool:
    """Return whether a conversion gives integers, or may: ``x.to(torch.long)``, ``x.to(y)``, ``x.type(name)``."""
    facts = tensor_facts(node)
    if facts is not None:
        return facts.dtype in _INTEGERS
    given = [*node.args[1:], *node.kwargs.values()]
    if any(isinstance(argument, torch.dtype) and argument not in _INTEGERS for argument in given):
        return False
    harmless = (bool, torch.device, torch.memory_format, type(None))
    return not all(isinstance(argument, harmless) for argument in given)


def _may_hold_integers(node: object) -> bool:
    facts = tensor_facts(node) if isinstance(node, Node) else None
    return facts is None or facts.dtype in _INTEGERS


def _is_floating(node: Node) -> bool:
    facts = tensor_facts(node)
    return facts is not None and (facts.dtype.is_floating_point or facts.dtype.is_complex)
