"""``s`` and ``t`` of all batch norms of a graph, in a few operations instead of a few for each.

An operation on a few dozen elements takes as long as one on thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fxopt_norm.formulas import scale_and_shift
from fxopt_rewrite import BatchNormCall

_BATCHED_ON = ("cpu", "cuda")


@dataclass(frozen=True, eq=False)
class Affine:
    """The affine map of a batch norm: ``scale * x + shift``, both (channels,) and in the widest dtype.

    Attributes:
        scale: the factors.
        shift: the summands.
        largest_scale: the largest magnitude among the factors; NaN if there is one.
        largest_shift: the same for the summands.
    """

    scale: Tensor
    shift: Tensor
    largest_scale: float
    largest_shift: float


class AffineMaps:
    """The affine maps of batch norms with running statistics, all computed when the first one is needed."""

    def __init__(self) -> None:
        self._pending: dict[int, BatchNormCall] = {}
        self._found: dict[int, tuple[BatchNormCall, Affine]] = {}

    def add(self, norm: BatchNormCall) -> None:
        """Add a batch norm whose map may be needed."""
        if id(norm) not in self._found and _is_plain(norm):
            self._pending[id(norm)] = norm

    def of(self, norm: BatchNormCall) -> Affine:
        """Return the affine map of a batch norm."""
        if id(norm) in self._pending:
            self._compute()
        if id(norm) not in self._found:
            self._found[id(norm)] = (norm, _affine_of(norm))
        return self._found[id(norm)][1]

    def _compute(self) -> None:
        groups: dict[tuple[object, ...], list[tuple[BatchNormCall, list[Tensor | None]]]] = {}
        for norm in self._pending.values():
            tensors = _tensors(norm)
            groups.setdefault(_kind(norm, tensors), []).append((norm, tensors))
        self._pending.clear()
        for group in groups.values():
            norms, rows = zip(*group, strict=True)
            for norm, affine in zip(norms, _affines_of(rows, norms[0].eps), strict=True):
                self._found[id(norm)] = (norm, affine)


def _tensors(norm: BatchNormCall) -> list[Tensor | None]:
    """Return mean, variance, weight and bias."""
    refs = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    return [None if ref is None else ref.tensor.detach() for ref in refs]


def _is_plain(norm: BatchNormCall) -> bool:
    """Return whether the tensors of a batch norm can be concatenated with those of others."""
    mean, refs = norm.running_mean, (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    if mean is None or norm.running_var is None or mean.tensor.device.type not in _BATCHED_ON:
        return False
    kind = (1, mean.tensor.shape, mean.tensor.device)
    tensors = [ref.tensor for ref in refs if ref is not None]
    return all(type(t) in (Tensor, nn.Parameter) and (t.dim(), t.shape, t.device) == kind for t in tensors)


def _kind(norm: BatchNormCall, tensors: Sequence[Tensor | None]) -> tuple[object, ...]:
    """Return what batch norms computed together have in common."""
    mean, *_ = tensors
    dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
    return norm.eps, None if mean is None else mean.device, *dtypes


def _affine_of(norm: BatchNormCall) -> Affine:
    mean, var, weight, bias = _tensors(norm)
    assert mean is not None
    assert var is not None
    return _measured(*scale_and_shift(mean, var, weight, bias, norm.eps))


def _measured(scale: Tensor, shift: Tensor) -> Affine:
    if scale.is_meta or scale.numel() == 0:
        return Affine(scale, shift, 0.0, 0.0)
    return Affine(scale, shift, scale.abs().amax().item(), shift.abs().amax().item())


def _affines_of(rows: Sequence[Sequence[Tensor | None]], eps: float) -> list[Affine]:
    """Return the affine maps of batch norms of one kind, given the tensors of each."""
    columns = zip(*rows, strict=True)
    mean, var, weight, bias = (None if column[0] is None else torch.cat(column) for column in columns)
    assert mean is not None
    assert var is not None
    scale, shift = scale_and_shift(mean, var, weight, bias, eps)
    sizes = [tensor.shape[0] for tensor, *_ in rows if tensor is not None]
    parts = list(zip(torch.split(scale, sizes), torch.split(shift, sizes), strict=True))
    if 0 in sizes or not bool((scale + shift).isfinite().all()):
        return [_measured(*part) for part in parts]
    lengths = torch.tensor(sizes, device=scale.device)
    largest = [torch.segment_reduce(each.abs(), "max", lengths=lengths).tolist() for each in (scale, shift)]
    return [Affine(*part, *bounds) for part, bounds in zip(parts, zip(*largest, strict=True), strict=True)]
