"""How far a tensor is from another one, and whether that is rounding.

The criterion, element by element, with a = original, b = transformed and the dtype's rtol and atol:

    |a - b| <= rtol * max(|a|, rms(a)) + atol * max(1, rms(a))

An element of a deep network's output is a sum of terms that may cancel. Its rounding error grows with the terms, not
with what is left of them, so that a small element among large ones is as wrong as these. The magnitude of the terms is
not known, but that of the whole output is: hence both parts are scaled by the root mean square of the original. (The
largest element would not do: hidden states of language models hold outliers of a thousand times the rest.) atol is not
scaled below 1, because the root mean square of a few elements may be small by chance, and then says nothing about the
terms.

Where a whole output is that small, such as probabilities over a large vocabulary, atol alone would let anything pass.
So, besides,

    rms(a - b) <= 0.1 * rms(a), unless rms(a) <= 64 * eps

must hold: below 64 units of rounding an output may be no more than what is left of terms that cancel. That exception is
not made where a run t of the original in float64 shows rms(a - t) <= 0.025 * rms(a): then it is more than that.

Depth is the other trouble: each layer carries on and amplifies the rounding of those before it, by a factor that no
table knows. In half precision 24 residual blocks already end beyond any tolerance that would still find mistakes, with
or without a pass. So an output that is beyond it passes nevertheless where a run t of the original in float64 shows
that the original itself is about as far from the truth:

    rms(a - b) <= 2 * rms(a - t)  and  max |a - b| <= 4 * max |a - t|  where  rms(a - t) <= 0.1 * rms(t)

Measured in three dtypes over networks of 12 and 24 layers, harmless changes stayed below 1.6 and 2.6 in place of 2 and
4. A mistake that is smaller than the original's own rounding cannot be told from it.

A tolerance that the caller states is taken as it is, |a - b| <= rtol * |a| + atol, and no other condition applies.

NaN equals NaN and an infinity equals itself at the same place; everything else that is not finite is infinitely wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxopt_core import Tolerance

_COARSE = 0.1
_EXACT = 0.025
_NOISE = 64
_TRUSTED_DB = 20.0
_TYPICAL_RATIO = 2.0
_LARGEST_RATIO = 4.0


@dataclass(frozen=True)
class Criterion:
    """What to allow.

    Attributes:
        tolerance: rtol and atol, or None where only equality will do.
        eps: the unit of rounding, or None where the caller stated the tolerance, which is then taken as it is.
        source: where the tolerance comes from: "of float32", "of bfloat16, in which the original computes", "as
            stated", "rtol as stated, atol of float32"; None where only equality will do.
    """

    tolerance: Tolerance | None
    eps: float | None = None
    source: str | None = None

    @property
    def text(self) -> str:
        """The tolerance with its source, or "exact"."""
        if self.tolerance is None:
            return "exact"
        return f"rtol {self.tolerance.rtol:.3g}, atol {self.tolerance.atol:.3g} {self.source or ''}".rstrip()


@dataclass(frozen=True)
class Worst:
    """The element that is furthest beyond what is allowed, or nearest to it.

    Attributes:
        index: its place.
        expected: its value in the original.
        found: its value in the transformed.
        allowed: by how much they may differ.
    """

    index: tuple[int, ...]
    expected: complex | float | int | bool
    found: complex | float | int | bool
    allowed: float


@dataclass(frozen=True)
class Measurement:
    """What comparing two tensors gave.

    Attributes:
        max_absolute_error: largest ``|a - b|``; 0 for empty tensors.
        max_relative_error: largest ``|a - b| / |a|`` where a is not zero.
        differing: how many elements differ by more than is allowed.
        worst: the one that does so most, or None for empty tensors.
        relative_rms: rms(a - b) / rms(a), where this alone is too large; None otherwise.
    """

    max_absolute_error: float
    max_relative_error: float
    differing: int
    worst: Worst | None
    relative_rms: float | None = None

    @property
    def passed(self) -> bool:
        """Whether everything is as it has to be."""
        return not self.differing and self.relative_rms is None


def measure(expected: Tensor, found: Tensor, criterion: Criterion, truth: Tensor | None = None) -> Measurement:
    """Compare two tensors of one shape.

    Args:
        expected: the original's, of any shape, dtype and layout.
        found: the transformed's, of the same shape.
        criterion: what to allow.
        truth: the original's in float64, or None where that is not known.
    """
    if not expected.numel():
        return Measurement(0.0, 0.0, 0, None)
    a, b = wide(expected), wide(found)
    error = _error(a, b) if criterion.tolerance is not None else _difference(expected, found)
    size = a.abs()
    allowed = _allowed(size, criterion)
    nonzero = (size > 0) & size.isfinite()
    relative = torch.where(nonzero, error / size, 0.0)
    excess = error if criterion.tolerance is None else torch.where(error > 0, error / allowed, 0.0)
    place = int(excess.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), error.shape))
    worst = Worst(index, value_at(expected, index), value_at(found, index), allowed.flatten()[place].item())
    return Measurement(
        max_absolute_error=error.max().item(),
        max_relative_error=relative.max().item(),
        differing=int((error > allowed).sum()),
        worst=worst,
        relative_rms=_too_coarse(a, error, criterion, truth),
    )


def sqnr_db(reference: Tensor, found: Tensor) -> float:
    """Return the signal-to-quantisation-noise ratio 10 log10(sum |r|^2 / sum |r - f|^2) in dB, of float tensors.

    Infinite where nothing differs, minus infinity where a value is finite in one of them alone.

    >>> round(sqnr_db(torch.tensor([10.0, 0.0]), torch.tensor([10.0, 1.0])))
    20
    """
    r, f = wide(reference), wide(found)
    noise = rms(_error(r, f))
    signal = rms(torch.where(r.isfinite(), r, 0.0))
    if noise == 0:
        return math.inf
    return -math.inf if noise == math.inf or signal == 0 else 20 * math.log10(signal / noise)


def is_rounding(expected: Tensor, found: Tensor, reference: Tensor) -> bool:
    """Return whether two tensors are no further apart than the first one's own rounding explains.

    Args:
        expected: the original's.
        found: the transformed's.
        reference: the original's in float64.
    """
    if sqnr_db(reference, expected) < _TRUSTED_DB:
        return False
    a, b, t = wide(expected), wide(found), wide(reference)
    error, own = _error(a, b), _error(a, t)
    return rms(error) <= _TYPICAL_RATIO * rms(own) and bool(error.max() <= _LARGEST_RATIO * own.max())


def wide(tensor: Tensor) -> Tensor:
    """Return a dense tensor of the same values in float64 or complex128, where the device knows them."""
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.device.type == "mps":  # it has no float64
        tensor = tensor.cpu()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def rms(tensor: Tensor) -> float:
    """Return the root mean square of a float64 or complex128 tensor; 0 for an empty one."""
    if not tensor.numel():
        return 0.0
    size = tensor.abs()
    largest: float = size.max().item()
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * (size / largest).square().mean().sqrt().item()  # squares alone may overflow


def value_at(tensor: Tensor, index: Sequence[int]) -> complex | float | int | bool:
    """Return one element as a Python number."""
    dense = tensor if tensor.layout is torch.strided and not tensor.is_quantized else wide(tensor)
    value: complex | float | int | bool = dense[tuple(index)].item()
    return value


def _error(a: Tensor, b: Tensor) -> Tensor:
    same = (a == b) | (a.isnan() & b.isnan())
    error = torch.where(same, 0.0, (a - b).abs())
    return torch.where(error.isnan(), math.inf, error)


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b|, at least 1 where they differ at all: float64 does not tell large integers apart."""
    if a.is_floating_point() or a.is_complex() or a.is_quantized:
        return _error(wide(a), wide(b))
    a, b = (t if t.layout is torch.strided else t.to_dense() for t in (a, b))
    return torch.where(a == b, 0.0, _error(wide(a), wide(b)).clamp_min(1.0))


def _allowed(size: Tensor, criterion: Criterion) -> Tensor:
    if criterion.tolerance is None:
        return torch.zeros_like(size)
    finite = torch.where(size.isfinite(), size, 0.0)
    rtol, atol = criterion.tolerance.rtol, criterion.tolerance.atol
    if criterion.eps is None:
        return atol + rtol * finite
    typical = rms(finite)
    return atol * max(1.0, typical) + rtol * finite.clamp_min(typical)


def _too_coarse(a: Tensor, error: Tensor, criterion: Criterion, truth: Tensor | None) -> float | None:
    """Return rms(a - b) / rms(a) where that is too large, whatever the size of a."""
    if criterion.eps is None:
        return None
    signal, noise = rms(torch.where(a.isfinite(), a, 0.0)), rms(error)
    if noise <= _COARSE * signal:
        return None
    left_over = signal <= _NOISE * criterion.eps and not _is_exact(a, signal, truth)
    return None if left_over or not signal else noise / signal


def _is_exact(a: Tensor, signal: float, truth: Tensor | None) -> bool:
    """Return whether a small output is known to be what it should be, and no remainder of terms that cancel."""
    return truth is not None and rms(_error(a, wide(truth))) <= _EXACT * signal
