"""How close a tensor is to another, and whether the difference is rounding.

The criterion, element by element, with a = original, b = transformed and the dtype's rtol and atol:

    |a - b| <= rtol * max(|a|, rms(a)) + atol * max(1, rms(a))

An element of a deep network's output is a sum of terms that may cancel. Its rounding error grows with the terms, not
with what remains of them. Their magnitude is unknown, but that of the whole output is known: hence both parts scale
with the root mean square of the original. (The largest element would not do: hidden states of language models contain
outliers a thousand times larger than the rest.) atol is not scaled below 1: the root mean square of a few elements may
be small by chance.

For an output that is small as a whole, such as probabilities over a large vocabulary, atol alone would accept anything.
So in addition

    rms(a - b) <= 0.1 * rms(a), unless rms(a) <= 64 * eps

must hold: below 64 units of rounding an output may be merely what remains of terms that cancel. There is no such
exception if a run t of the original in float64 shows rms(a - t) <= 0.025 * rms(a): then the output is meaningful.

Depth is the other difficulty: each layer passes on and amplifies the rounding of those before it, by a factor that no
table knows. In half precision 24 residual blocks already exceed any tolerance that would still find mistakes. So an
output beyond the tolerance passes nevertheless if a run t of the original in float64 shows that the original itself is
about as far from the truth:

    rms(a - b) <= 2 * rms(a - t)  and  max |a - b| <= 4 * max |a - t|  where  rms(a - t) <= 0.1 * rms(t)

Measured in three dtypes over networks of 12 and 24 layers, harmless changes stayed below 1.6 and 2.6, where 2 and 4 are
allowed. A mistake smaller than the original's own rounding cannot be distinguished from it.

A tolerance given by the caller is taken literally, |a - b| <= rtol * |a| + atol, and no other condition applies.
NaN equals NaN and an infinity equals itself at the same place; any other difference in non-finite values is infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fxopt_core.tolerances import Tolerance

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
        tolerance: rtol and atol, or None if values must be equal or are judged by their ratio.
        eps: the unit of rounding, or None if the caller gave the tolerance, which is then taken literally.
        source: where the tolerance or the ratio comes from, as in `OutputReport`; None if values must be equal.
        sqnr: the least signal-to-noise ratio in dB; None if single values are judged.
    """

    tolerance: Tolerance | None
    eps: float | None = None
    source: str | None = None
    sqnr: float | None = None

    @property
    def text(self) -> str:
        """The tolerance or the ratio with its source, or "exact"."""
        if self.sqnr is not None:
            return f"SQNR {self.sqnr:.3g} dB {self.source or ''}".rstrip()
        if self.tolerance is None:
            return "exact"
        return f"rtol {self.tolerance.rtol:.3g}, atol {self.tolerance.atol:.3g} {self.source or ''}".rstrip()


@dataclass(frozen=True)
class Worst:
    """The element whose difference is the largest multiple of what is allowed.

    Attributes:
        index: its index.
        expected: its value in the original.
        found: its value in the transformed tensor.
        allowed: by how much they may differ.
    """

    index: tuple[int, ...]
    expected: complex | float | int | bool
    found: complex | float | int | bool
    allowed: float


@dataclass(frozen=True)
class Measurement:
    """The result of comparing two tensors.

    Attributes:
        max_absolute_error: largest ``|a - b|``; 0 for empty tensors.
        max_relative_error: largest ``|a - b| / |a|`` over nonzero elements of a.
        differing: how many elements differ by more than is allowed.
        worst: the worst element, or None for empty tensors.
        relative_rms: rms(a - b) / rms(a) if it is too large; None otherwise.
    """

    max_absolute_error: float
    max_relative_error: float
    differing: int
    worst: Worst | None
    relative_rms: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the tensors agree."""
        return not self.differing and self.relative_rms is None


def measure(expected: Tensor, found: Tensor, criterion: Criterion, truth: Tensor | None = None) -> Measurement:
    """Compare two tensors of the same shape, of any dtype and layout; `truth` is the original in float64, if known."""
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
    one, other = (_dense(tensor)[index].item() for tensor in (expected, found))
    worst = Worst(index, one, other, allowed.flatten()[place].item())
    return Measurement(
        max_absolute_error=error.max().item(),
        max_relative_error=relative.max().item(),
        differing=int((error > allowed).sum()),
        worst=worst,
        relative_rms=_too_coarse(a, error, criterion, truth),
    )


def sqnr_db(reference: Tensor, found: Tensor) -> float:
    """Return the signal-to-quantisation-noise ratio 10 log10(sum |r|^2 / sum |r - f|^2) in dB, of float tensors.

    Infinite if nothing differs, minus infinity if a value is finite in only one of the two.

    >>> round(sqnr_db(torch.tensor([10.0, 0.0]), torch.tensor([10.0, 1.0])))
    20
    """
    r, f = wide(reference), wide(found)
    noise = rms(_error(r, f))
    signal = rms(torch.where(r.isfinite(), r, 0.0))
    if noise == 0:
        return math.inf
    return -math.inf if noise == math.inf or signal == 0 else 20 * math.log10(signal / noise)


def least_sqnr_db(allowed: float, own: float | None) -> float:
    """Return the least ratio for an output whose original has a ratio of its own, since the noises add up."""
    return allowed if own is None else -10 * math.log10(10 ** (-allowed / 10) + 10 ** (-own / 10))


def cosine(reference: Tensor, found: Tensor) -> float:
    """Return the cosine similarity of two float tensors; of several samples (entries of the first dimension) the least.

    A sample that is zero is similar to itself alone. NaN if values are not finite.

    >>> cosine(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.0, 1.0]]))
    0.7071...
    """
    r, f = (wide(t).reshape(t.shape[0] if t.dim() > 1 else 1, -1) for t in (reference, found))
    r, f = (t / t.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny) for t in (r, f))
    sizes = torch.linalg.vector_norm(r, dim=1) * torch.linalg.vector_norm(f, dim=1)
    found_zero = torch.where((r == f).all(1), 1.0, 0.0)
    return torch.where(sizes > 0, (r * f.conj()).real.sum(1) / sizes, found_zero).clamp(-1, 1).min().item()


def is_rounding(expected: Tensor, found: Tensor, reference: Tensor) -> bool:
    """Return whether the original's own rounding, known from its run in float64, explains the difference."""
    if sqnr_db(reference, expected) < _TRUSTED_DB:
        return False
    a, b, t = wide(expected), wide(found), wide(reference)
    error, own = _error(a, b), _error(a, t)
    return rms(error) <= _TYPICAL_RATIO * rms(own) and bool(error.max() <= _LARGEST_RATIO * own.max())


def wide(tensor: Tensor) -> Tensor:
    """Return a dense tensor of the same values in float64 or complex128."""
    dense = _dense(tensor)
    if dense.device.type == "mps":  # MPS has no float64
        dense = dense.cpu()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


def _dense(tensor: Tensor) -> Tensor:
    plain = tensor.dequantize() if tensor.is_quantized else tensor
    return plain if plain.layout is torch.strided else plain.to_dense()


def rms(tensor: Tensor) -> float:
    """Return the root mean square of a float64 or complex128 tensor; 0 for an empty one."""
    if not tensor.numel():
        return 0.0
    size = tensor.abs()
    largest: float = size.max().item()
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * (size / largest).square().mean().sqrt().item()  # squares alone may overflow


def _error(a: Tensor, b: Tensor) -> Tensor:
    same = (a == b) | (a.isnan() & b.isnan())
    error = torch.where(same, 0.0, (a - b).abs())
    return torch.where(error.isnan(), math.inf, error)


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b|, at least 1 where integers differ at all: in float64 large ones may coincide."""
    a, b = _dense(a), _dense(b)
    error = _error(wide(a), wide(b))
    return error if a.is_floating_point() or a.is_complex() else torch.where(a == b, 0.0, error.clamp_min(1.0))


def _allowed(size: Tensor, criterion: Criterion) -> Tensor:
    if criterion.tolerance is None:
        return torch.full_like(size, 0.0 if criterion.sqnr is None else math.inf)
    finite = torch.where(size.isfinite(), size, 0.0)
    rtol, atol = criterion.tolerance.rtol, criterion.tolerance.atol
    if criterion.eps is None:
        return atol + rtol * finite
    typical = rms(finite)
    return atol * max(1.0, typical) + rtol * finite.clamp_min(typical)


def _too_coarse(a: Tensor, error: Tensor, criterion: Criterion, truth: Tensor | None) -> float | None:
    """Return rms(a - b) / rms(a) if it is too large for an output of any size, or None."""
    if criterion.eps is None:
        return None
    signal, noise = rms(torch.where(a.isfinite(), a, 0.0)), rms(error)
    if noise <= _COARSE * signal:
        return None
    exact = truth is not None and rms(_error(a, wide(truth))) <= _EXACT * signal
    remainder = signal <= _NOISE * criterion.eps and not exact  # of terms that cancel
    return None if remainder or not signal else noise / signal
