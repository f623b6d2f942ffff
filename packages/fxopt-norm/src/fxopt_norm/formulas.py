"""The arithmetic of folding.

Batch norm with running statistics is affine: ``y = s * x + t`` with ``s = weight / sqrt(var + eps)`` and
``t = bias - s * mean`` (Ioffe and Szegedy, https://arxiv.org/abs/1502.03167, section 3.1). A missing weight is one, a
missing bias is zero. All is computed in float64 where the device has it, else in float32, and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scale_and_shift(
    mean: Tensor, var: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return ``s`` and ``t``, both (channels,), of ``batch_norm(x) = s * x + t``.

    >>> s, t = scale_and_shift(torch.zeros(1), torch.ones(1), None, torch.ones(1), 0.0)
    >>> s.item(), t.item()
    (1.0, 1.0)
    """
    scale = torch.rsqrt(_precise(var) + eps)
    if norm_weight is not None:
        scale = scale * _precise(norm_weight)
    shift = -scale * _precise(mean)
    return scale, shift if norm_bias is None else shift + _precise(norm_bias)


def fold_after(
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    *,
    eps: float,
    transposed: bool = False,
    groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return weight and bias of ``batch_norm(layer(x))`` as one layer.

    Args:
        weight: (out, in, ...), or (in, out / groups, ...) of a transposed convolution.
        bias: (out,), or None.
        mean: running mean, (out,).
        var: running variance, (out,).
        norm_weight: (out,), or None for ones.
        norm_bias: (out,), or None for zeros.
        eps: what the batch norm adds to the variance.
        transposed: whether the layer is a transposed convolution.
        groups: its groups.

    Returns:
        The new weight, of the shape, dtype and memory format of the old one, and the new bias.
    """
    scale, shift = scale_and_shift(mean, var, norm_weight, norm_bias, eps)
    if transposed:
        rest = (1,) * (weight.dim() - 2)
        factors = scale.reshape(groups, 1, -1, *rest).expand(groups, weight.shape[0] // groups, -1, *rest)
        factors = factors.reshape(weight.shape[0], -1, *rest)
    else:
        factors = scale.reshape(-1, *(1,) * (weight.dim() - 1))
    if bias is not None:
        shift = shift + scale * _precise(bias)
    return (_precise(weight) * factors).to(weight.dtype), shift.to(weight.dtype)


def fold_before(
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    *,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return weight (out, in) and bias (out,) of ``linear(batch_norm(x))`` as one linear layer.

    ``W (s * x + t) + b = (W * s) x + (W t + b)``; the statistics are (in,).
    """
    scale, shift = scale_and_shift(mean, var, norm_weight, norm_bias, eps)
    wide = _precise(weight)
    moved = wide @ shift
    if bias is not None:
        moved = moved + _precise(bias)
    return (wide * scale).to(weight.dtype), moved.to(weight.dtype)


def _precise(tensor: Tensor) -> Tensor:
    """Return a tensor in the widest floating dtype of its device."""
    return tensor.detach().to(torch.float32 if tensor.device.type == "mps" else torch.float64)
