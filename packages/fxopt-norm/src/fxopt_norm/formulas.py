"""The arithmetic of folding.

Batch norm with running statistics is affine: ``y = s * x + t`` with ``s = weight / sqrt(var + eps)`` and
``t = bias - s * mean`` (Ioffe and Szegedy, https://arxiv.org/abs/1502.03167, section 3.1). A missing weight is one, a
missing bias is zero. Everything is computed in float64 (float32 on devices without it), and rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fxopt_core import NotReversibleError


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
        weight: (out, in, ...), or (in, out / groups, ...) for a transposed convolution.
        bias: (out,), or None.
        mean: running mean, (out,).
        var: running variance, (out,).
        norm_weight: (out,), or None for ones.
        norm_bias: (out,), or None for zeros.
        eps: constant that the batch norm adds to the variance.
        transposed: whether the layer is a transposed convolution.
        groups: its number of groups.

    Returns:
        The new weight, of the shape, dtype and memory format of the old one, and the new bias.
    """
    scale, shift = scale_and_shift(mean, var, norm_weight, norm_bias, eps)
    return scaled_after(weight, bias, scale, shift, transposed=transposed, groups=groups)


def scaled_after(
    weight: Tensor, bias: Tensor | None, scale: Tensor, shift: Tensor, *, transposed: bool = False, groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Return weight and bias of ``scale * layer(x) + shift``, as `fold_after` does."""
    if transposed:
        rest = (1,) * (weight.dim() - 2)
        factors = scale.reshape(groups, 1, -1, *rest).expand(groups, weight.shape[0] // groups, -1, *rest)
        factors = factors.reshape(weight.shape[0], -1, *rest)
    else:
        factors = scale.reshape(-1, *(1,) * (weight.dim() - 1))
    if bias is not None:
        shift = shift + scale * _precise(bias)
    return _scaled(weight, factors), shift.to(weight.dtype)


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
    return scaled_before(weight, bias, *scale_and_shift(mean, var, norm_weight, norm_bias, eps))


def scaled_before(weight: Tensor, bias: Tensor | None, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight and bias of ``layer(scale * x + shift)``, as `fold_before` does."""
    wide = _precise(weight)
    moved = wide @ shift
    if bias is not None:
        moved = moved + _precise(bias)
    return (wide * scale).to(weight.dtype), moved.to(weight.dtype)


_BLOCK = 1 << 17
"""Number of elements computed at once: in float64, they fit into a core's cache."""


def _scaled(weight: Tensor, factors: Tensor) -> Tensor:
    """Return ``weight * factors``, rounded once; ``factors`` has as many rows, or is broadcast over the rest.

    In float64 a large weight takes twice its memory, and the product as much again. Computing it in blocks avoids that
    and takes a third of the time.
    """
    whole = weight.numel() <= 2 * _BLOCK or weight.device.type != "cpu" or type(weight) not in (Tensor, nn.Parameter)
    if whole or weight.dtype == torch.float64 or factors.shape[0] != weight.shape[0]:
        return (_precise(weight) * factors).to(weight.dtype)
    detached = weight.detach()
    scaled = torch.empty_like(detached)
    rows = max(1, _BLOCK * weight.shape[0] // weight.numel())
    wide = torch.empty_like(detached[:rows], dtype=torch.float64)
    parts = (torch.split(each, rows) for each in (detached, factors, scaled))
    for part, factor, into in zip(*parts, strict=True):
        into.copy_(wide[: len(part)].copy_(part).mul_(factor))
    return scaled


def restore_after(
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    transposed: bool = False,
    groups: int = 1,
    shapes: Mapping[str, tuple[int, ...] | None],
) -> dict[str, Tensor]:
    """Return tensors from which `fold_after` computes this weight and bias again, bit for bit.

    The layer gets the folded weights, and no bias or zeros. The batch norm only adds the folded bias, by its own bias
    or by its mean, the negative of it. Its variance is ``1 - eps``; even rounded, that leaves ``s`` so close to one
    that no weight changes.

    Args:
        weight: the folded weight.
        bias: the folded bias, (out,).
        eps: as in `fold_after`.
        transposed: as in `fold_after`.
        groups: as in `fold_after`.
        shapes: the shapes of the arguments of `fold_after`; None for absent ones.

    >>> shapes = {"weight": (1, 1), "bias": None, "mean": (1,), "var": (1,), "norm_weight": None, "norm_bias": None}
    >>> found = restore_after(torch.ones(1, 1), torch.ones(1), eps=0.25, shapes=shapes)
    >>> {name: tensor.flatten().tolist() for name, tensor in found.items()}
    {'weight': [1.0], 'mean': [-1.0], 'var': [0.75]}
    """
    # The batch norm takes the shift, so that one before a layer without bias can be restored, too.
    found = {"weight": weight, **_adding(bias, eps, shapes)}
    return found if shapes["bias"] is None else {**found, "bias": torch.zeros_like(bias)}


def restore_before(
    weight: Tensor, bias: Tensor, *, eps: float, shapes: Mapping[str, tuple[int, ...] | None]
) -> dict[str, Tensor]:
    """Return tensors from which `fold_before` computes this weight and bias again.

    As in `restore_after`, the layer gets the folded weights, and also the folded bias. If it has no bias, the batch
    norm has to add some ``t`` with ``W t = b``. That exists if ``b`` is unchanged since folding, or if ``W`` has full
    row rank.

    Raises:
        NotReversibleError: The layer has no bias, and no ``t`` gives the folded one.
    """
    if shapes["bias"] is None:
        return {"weight": weight, **_adding(_solution(weight, bias), eps, shapes)}
    return {"weight": weight, "bias": bias, **_adding(weight.new_zeros(weight.shape[1]), eps, shapes)}


def _adding(shift: Tensor, eps: float, shapes: Mapping[str, tuple[int, ...] | None]) -> dict[str, Tensor]:
    """Return the tensors of a batch norm that adds a shift to its input, in the widest dtype."""
    shift = _precise(shift)
    zeros = torch.zeros_like(shift)
    found = {"mean": -shift if shapes["norm_bias"] is None else zeros, "var": zeros + (1.0 - eps)}
    found |= {} if shapes["norm_weight"] is None else {"norm_weight": zeros + 1.0}
    return found | ({} if shapes["norm_bias"] is None else {"norm_bias": shift})


def _solution(weight: Tensor, bias: Tensor) -> Tensor:
    """Return the smallest ``t`` with ``weight @ t = bias``, in the widest dtype."""
    if weight.is_meta:
        return weight.new_empty(weight.shape[1])
    wide, wanted = _precise(weight).cpu(), _precise(bias).cpu()
    shift: Tensor = torch.linalg.lstsq(wide, wanted.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    # The error of rounding `bias`, and `t` to the dtype of the batch norm, and that of solving.
    precision = 2 * torch.finfo(weight.dtype).eps + 16 * len(shift) * torch.finfo(wide.dtype).eps
    bound = precision * (wide.abs() @ shift.abs() + wanted.abs())
    if not bool(((wide @ shift.to(weight.dtype).to(wide.dtype) - wanted).abs() <= bound).all()):
        raise NotReversibleError(
            "the linear layer after the batch norm has no bias, and no shift of its input gives the folded bias, "
            "which was trained or loaded since. Save graph_module.state_dict(), or give the original layer a bias of "
            "zeros before folding"
        )
    return shift.to(weight.device, _precise(weight).dtype)


def _precise(tensor: Tensor) -> Tensor:
    """Return a tensor in the widest floating dtype of its device."""
    return tensor.detach().to(torch.float32 if tensor.device.type == "mps" else torch.float64)
