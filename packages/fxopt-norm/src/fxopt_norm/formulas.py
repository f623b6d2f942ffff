"""The arithmetic of folding.

Batch norm with running statistics is affine: ``y = s * x + t`` with ``s = weight / sqrt(var + eps)`` and
``t = bias - s * mean`` (Ioffe and Szegedy, https://arxiv.org/abs/1502.03167, section 3.1). A missing weight is one, a
missing bias is zero. Everything is computed in float64 (float32 on devices without it), and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
        # (out,) -> (groups, 1, out / groups) -> (in, out / groups): inputs of a group share the factors of its outputs.
        rest = (1,) * (weight.dim() - 2)
        factors = scale.reshape(groups, 1, -1, *rest).expand(groups, weight.shape[0] // groups, -1, *rest)
        factors = factors.reshape(weight.shape[0], -1, *rest)
    else:
        factors = scale.reshape(-1, *(1,) * (weight.dim() - 1))
    if bias is not None:
        shift = shift + scale * _precise(bias)
    return _by_rows(weight, lambda rows: _precise(weight[rows]) * factors[rows]), shift.to(weight.dtype)


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


#: Number of elements computed at once: in float64, they fit into a core's cache.
_BLOCK = 1 << 17


def _by_rows(like: Tensor, compute: Callable[[slice], Tensor]) -> Tensor:
    """Return a tensor like another one, of rows that are computed in the widest dtype and rounded once.

    In float64 a large weight takes twice its memory, and a product as much again. Computing it in blocks avoids that
    and takes a third of the time.
    """
    if type(like) not in (Tensor, nn.Parameter):
        return compute(slice(None)).to(like.dtype)
    made = torch.empty_like(like, requires_grad=False)
    step = max(1, _BLOCK * len(like) // max(1, like.numel()))
    for start in range(0, len(like), step):
        rows = slice(start, start + step)
        made[rows] = compute(rows)
    return made


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

    As in `restore_after`, the layer gets the folded weights, and also the folded bias.

    Raises:
        NotReversibleError: The layer has no bias that could hold the folded one.
    """
    if shapes["bias"] is None:
        raise NotReversibleError(
            "the linear layer after the batch norm has no bias that could hold the folded one. Save "
            "graph_module.state_dict(), or give the original layer a bias of zeros before folding"
        )
    return {"weight": weight, "bias": bias, **_adding(weight.new_zeros(weight.shape[1]), eps, shapes)}


#: The tensors of a layer and the batch norm after it, as `fold_after` takes them.
TENSORS = ("weight", "bias", "mean", "var", "norm_weight", "norm_bias")


def merge_branches(*, eps: tuple[float | None, ...], **tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a sum of branches, each ``batch_norm(conv(x))``, as one convolution.

    Args:
        eps: for each branch, the constant of its batch norm; None without one.
        tensors: those of `fold_after` for each branch, with its number: ``weight_0``, ``bias_0``, ...; a branch without
            weight is the identity, or the batch norm alone.

    Returns:
        The new weight, of the shape, dtype and memory format of the largest one, and the new bias, or None.

    >>> merge_branches(eps=(None, None), weight_0=torch.tensor([[[1.0, 2.0, 3.0]]]), bias_0=torch.ones(1))
    (tensor([[[1., 3., 3.]]]), tensor([1.]))
    """
    weights = (each for name, each in tensors.items() if name.startswith("weight") and each is not None)
    largest = max(weights, key=Tensor.numel)
    kernels: list[tuple[Tensor, Tensor | None]] = []
    shifts = []
    for place, constant in enumerate(eps):
        weight, bias, mean, var, gain, offset = (tensors.get(f"{name}_{place}") for name in TENSORS)
        scale, shift = None, None if bias is None else _precise(bias)
        if constant is not None and mean is not None and var is not None:
            scale, own = scale_and_shift(mean, var, gain, offset, constant)
            shift = own if shift is None else own + scale * shift
            scale = scale.reshape(-1, *(1,) * (largest.dim() - 1))
        kernels.append((_identity(largest) if weight is None else weight, scale))
        shifts += [] if shift is None else [shift]

    def rows_of_sum(rows: slice) -> Tensor:
        wide = ((_precise(kernel[rows]), scale) for kernel, scale in kernels)
        parts = [kernel if scale is None else kernel * scale[rows] for kernel, scale in wide]
        return sum((_centred(part, largest) for part in parts[1:]), _centred(parts[0], largest))

    return _by_rows(largest, rows_of_sum), sum(shifts[1:], shifts[0]).to(largest.dtype) if shifts else None


def restore_branches(
    weight: Tensor, bias: Tensor | None, *, eps: tuple[float | None, ...], shapes: Mapping[str, tuple[int, ...] | None]
) -> dict[str, Tensor]:
    """Return tensors from which `merge_branches` computes this weight and bias again, up to rounding.

    The first convolution with the largest kernel gets the weight, and the bias, if it or its batch norm can hold it.
    The other branches add nothing: batch norms of the identity get a weight of zeros, and another convolution
    subtracts identities without one. Without another convolution, the first subtracts them, which rounds its weight.
    """
    wide, found = _precise(weight), dict[str, Tensor]()
    home = next(place for place in range(len(eps)) if shapes[f"weight_{place}"] == tuple(weight.shape))
    identities = 0
    # The convolution with the largest kernel comes first: the first that can hold the bias gets it.
    for place in sorted(range(len(eps)), key=lambda each: each != home):
        here = {name: shapes[f"{name}_{place}"] for name in TENSORS}
        own = {name: wide.new_zeros(shape) for name in ("weight", "bias") if (shape := here[name]) is not None}
        constant = eps[place]
        if constant is not None:
            own |= _adding(wide.new_zeros(len(weight)) if bias is None else bias, constant, here)
            bias = None
        elif "bias" in own and bias is not None:
            own["bias"], bias = bias, None
        if here["weight"] is None and here["norm_weight"] is not None and here["norm_bias"] is not None:
            own["norm_weight"] = torch.zeros_like(own["norm_weight"])
        else:
            identities += here["weight"] is None
        found |= {f"{name}_{place}": value for name, value in own.items()}
    others = (found[f"weight_{each}"] for each in range(len(eps)) if each != home and shapes[f"weight_{each}"])
    if identities and (other := next(others, None)) is not None:
        other -= identities * _centred(_identity(other), other)
    # The weight at `home` is zeros so far. It gets what is left after the other branches, rounded as they are saved.
    rounded = {name: value.to(weight.dtype).to(wide.dtype) for name, value in found.items()}
    return found | {f"weight_{home}": wide - merge_branches(eps=eps, **rounded)[0]}


def _identity(like: Tensor) -> Tensor:
    """Return the kernel of one element that maps each channel to itself, for a weight (channels, in / groups, ...)."""
    wide = _precise(like.new_empty(0))
    # (channels, in / groups): the inputs of each group count from zero, so each group has an identity of its own.
    rows = torch.eye(like.shape[1], dtype=wide.dtype, device=wide.device).repeat(len(like) // like.shape[1], 1)
    return rows.reshape(*rows.shape, *(1,) * (like.dim() - 2))


def _centred(kernel: Tensor, like: Tensor) -> Tensor:
    """Return a kernel with zeros around it, of the size of a larger one."""
    # ``pad`` takes the last dimension first.
    margins = [(most - size) // 2 for most, size in zip(like.shape[2:], kernel.shape[2:], strict=True)][::-1]
    return nn.functional.pad(kernel, [each for margin in margins for each in (margin, margin)])


def _adding(shift: Tensor, eps: float, shapes: Mapping[str, tuple[int, ...] | None]) -> dict[str, Tensor]:
    """Return the tensors of a batch norm that adds a shift to its input, in the widest dtype."""
    shift = _precise(shift)
    zeros = torch.zeros_like(shift)
    found = {"mean": -shift if shapes["norm_bias"] is None else zeros, "var": zeros + (1.0 - eps)}
    found |= {} if shapes["norm_weight"] is None else {"norm_weight": zeros + 1.0}
    return found | ({} if shapes["norm_bias"] is None else {"norm_bias": shift})


def _precise(tensor: Tensor) -> Tensor:
    """Return a tensor in the widest floating dtype of its device."""
    return tensor.detach().to(torch.float32 if tensor.device.type == "mps" else torch.float64)
