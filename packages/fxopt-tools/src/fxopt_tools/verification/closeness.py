"""How close a tensor is to another, and whether the difference is rounding.

The criterion, element by element, with a = original, b = transformed, s = the scale of the element and the dtype's rtol
and atol (`fxopt_rewrite.tolerances` derives these):

    |a - b| <= rtol * max(|a|, s) + atol * max(1, s)

An element of a deep network's output is a sum of terms that may cancel. Its rounding error grows with the terms, not
with their sum. The magnitude of the terms is unknown, but that of similar elements is known: it is the element's scale,
as `fxopt_tools.verification.magnitudes` defines it. The scale is close to the root mean square of ordinary elements,
however extreme others are: masked scores, outliers of hidden states, rows a million times larger. atol is not scaled
below 1: a few elements may be small by chance. Zeros have the scale 0, or, if there is no run in float64 to tell which
values became zero by rounding, and values reach down to zero, the scale of the smallest elements.

For elements that are small, such as probabilities over a large vocabulary, atol alone would accept anything. So in
addition, for the elements of each magnitude m, together with those of comparable magnitude,

    rms(a - b) <= 0.1 * s, unless s <= 64 * eps

must hold, if these are at least eight and a 64th of all (or all): below 64 units of rounding they may merely be the
remainder of terms that cancel. There is no such exception if a run t of the original in float64 shows
rms(a - t) <= 0.025 * s: then they are meaningful. Elements below the smallest normal number of float32 never are, since
some kernels flush them to zero.

Depth is the other difficulty: each layer passes on and amplifies the rounding of those before it, by a factor that no
table knows. In half precision 24 residual blocks already exceed any tolerance that would still find mistakes. So a
difference beyond the tolerance still passes if a run t of the original in float64 shows that the original itself is
about as far from the truth, for each magnitude at which something is beyond:

    rms(a - b) <= 4 k * rms(a - t)  and  max |a - b| <= 4 k * max |a - t|  with  k = 1 + 4 / sqrt(n)

over the elements of comparable magnitude, of which about n contribute. Both sides omit the rounding of each result
itself: masks of -1e4 are off by several units in half precision, which says nothing about scores. k allows for chance
among few elements. The original must be trustworthy: its signal-to-noise ratio is at least 20 dB. Measured in three
dtypes over networks of 12 and 24 layers, harmless changes stayed below 1.6 and 2.6; batch norms folded in
EfficientNet-Lite0, which rounds its weights once more, are further off. A mistake smaller
than the original's own rounding cannot be distinguished from it.

The signal-to-noise ratio is the lowest of that of the whole and of those of groups of elements that a gap of a factor
of 128 separates from larger ones: masks do not make scores look exact.

A tolerance given by the caller is taken literally, |a - b| <= rtol * |a| + atol, and no other condition applies.
NaN equals NaN and an infinity equals itself at the same place; any other difference in non-finite values is infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fxopt_rewrite import Tolerance
from fxopt_tools.verification.magnitudes import Magnitudes

# The numbers of the criterion as it is stated above: 0.1 and 0.025 (of s), 64 (eps), 20 dB, 4 k for typical and for
# largest errors, and the 4 in k.
_COARSE = 0.1
_EXACT = 0.025
_NOISE = 64
_TRUSTED_DB = 20.0
_TYPICAL_RATIO = 4.0
_LARGEST_RATIO = 4.0
_CHANCE = 4
_SUBNORMAL = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Criterion:
    """The criterion for one comparison.

    Attributes:
        tolerance: rtol and atol, or None if values must be equal or are judged by their ratio.
        eps: the unit of rounding, or None if the caller gave the tolerance, which is then taken literally.
        source: where the tolerance or the ratio comes from, as in `OutputReport`; None if values must be equal.
        sqnr: the lowest signal-to-noise ratio in dB; None if single values are judged.
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
        nans: how many elements are NaN in both, and not compared.
        relative_rms: the largest rms(a - b) / s of elements of one magnitude, if it is too large; None otherwise.
        lost_nans: how many elements are NaN only in the original.
    """

    max_absolute_error: float
    max_relative_error: float
    differing: int
    worst: Worst | None
    nans: int = 0
    relative_rms: float | None = None
    lost_nans: int = 0

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
    magnitudes = None if criterion.eps is None else Magnitudes(size)
    allowed = _allowed(size, criterion, magnitudes, of_zeros=truth is None)
    relative = torch.where((size > 0) & size.isfinite(), error / size, 0.0)
    # How many times as large as allowed. Where nothing differs it is 0: NaN, from 0 / 0, would be the largest.
    excess = error if criterion.tolerance is None else torch.where(error > 0, error / allowed, 0.0)
    place = int(excess.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), error.shape))
    one, other = (_dense(tensor)[index].item() for tensor in (expected, found))
    worst = Worst(index, one, other, allowed.flatten()[place].item())
    coarse: dict[int, float] = {}
    if magnitudes is not None and criterion.eps is not None:
        coarse = _coarse(magnitudes, error, None if truth is None else _error(a, wide(truth)), criterion.eps)
    return Measurement(
        max_absolute_error=error.max().item(),
        max_relative_error=relative.max().item(),
        differing=int((error > allowed).sum()),
        worst=worst,
        nans=int((a.isnan() & b.isnan()).sum()),
        lost_nans=int((a.isnan() & ~b.isnan()).sum()),
        relative_rms=max(coarse.values(), default=None),
    )


def sqnr_db(reference: Tensor, found: Tensor) -> float:
    """Return the signal-to-quantisation-noise ratio 10 log10(sum |r|^2 / sum |r - f|^2) in dB, of float tensors.

    It is the ratio of values that lie far below others, if theirs is lower. Infinite if nothing differs, minus infinity
    if a value is finite in only one of the two.

    >>> round(sqnr_db(torch.tensor([10.0, 0.0]), torch.tensor([10.0, 1.0])))
    20
    """
    r, f = wide(reference), wide(found)
    error, size = _error(r, f), torch.where(r.isfinite(), r.abs(), 0.0)
    return min(_ratio(size[size <= cut], error[size <= cut]) for cut in Magnitudes(size).cuts())


def _ratio(signal: Tensor, noise: Tensor) -> float:
    one, other = rms(signal), rms(noise)
    if other == 0:
        return math.inf
    return -math.inf if other == math.inf or one == 0 else 20 * math.log10(one / other)


def least_sqnr_db(allowed: float, own: float | None) -> float:
    """Return the lowest ratio for an output whose original has its own ratio, since the noises add up."""
    return allowed if own is None else -10 * math.log10(10 ** (-allowed / 10) + 10 ** (-own / 10))


def cosine(reference: Tensor, found: Tensor) -> float:
    """Return the cosine similarity of two float tensors, the lowest over samples (entries of the first dimension).

    A sample that is zero is similar only to itself. NaN if values are not finite.

    >>> cosine(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.0, 1.0]]))
    0.7071...
    """
    r, f = (wide(t).reshape(t.shape[0] if t.dim() > 1 else 1, -1) for t in (reference, found))
    # Each sample is divided by its largest element, since squares may overflow; zeros stay zeros.
    r, f = (t / t.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny) for t in (r, f))
    sizes = torch.linalg.vector_norm(r, dim=1) * torch.linalg.vector_norm(f, dim=1)
    found_zero = torch.where((r == f).all(1), 1.0, 0.0)
    return torch.where(sizes > 0, (r * f.conj()).real.sum(1) / sizes, found_zero).clamp(-1, 1).min().item()


def is_rounding(expected: Tensor, found: Tensor, reference: Tensor, criterion: Criterion) -> bool:
    """Return whether the original's own rounding, as its run in float64 shows it, explains a difference."""
    a, b, t = wide(expected), wide(found), wide(reference)
    error, own, size, eps = _error(a, b), _error(a, t), a.abs(), criterion.eps
    if eps is None or not error.isfinite().all() or sqnr_db(reference, expected) < _TRUSTED_DB:
        return False
    magnitudes = Magnitudes(size)
    beyond = magnitudes.count(error > _allowed(size, criterion, magnitudes, of_zeros=False))
    beyond_as_a_whole = _coarse(magnitudes, error, own, eps)
    # Rounding moves a and b by up to eps / 2 each; t is not rounded, so a - t contains only half of that.
    last = torch.where(size.isfinite(), eps * size, math.inf)  # what rounding the results themselves contributes
    noise = magnitudes.per_power((error - last).clamp_min(0.0))
    rounding = magnitudes.per_power((torch.where(own.isfinite(), own, 0.0) - last / 2).clamp_min(0.0))
    for number, near, _ in magnitudes.windows():
        if beyond[number] or number in beyond_as_a_whole:
            squares, fourths = rounding.squares[near].sum().item(), rounding.fourths[near].sum().item()
            # The participation ratio: n for n errors of one size, 1 for a single error.
            contributing = squares**2 / fourths if fourths else 0.0  # about how many make up the sum
            chance = 1 + _CHANCE / math.sqrt(max(contributing, 1.0))
            if noise.squares[near].sum() > (_TYPICAL_RATIO * chance) ** 2 * squares:
                return False
            if noise.largest[number] > _LARGEST_RATIO * chance * rounding.largest[near].max():
                return False
    return True


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
    # The difference of equal infinities is NaN, so these are found first.
    error = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    return torch.where(error.isnan(), math.inf, error)


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b|, at least 1 where integers differ at all: in float64 large ones may coincide."""
    a, b = _dense(a), _dense(b)
    error = _error(wide(a), wide(b))
    return error if a.is_floating_point() or a.is_complex() else torch.where(a == b, 0.0, error.clamp_min(1.0))


def _allowed(size: Tensor, criterion: Criterion, magnitudes: Magnitudes | None, *, of_zeros: bool) -> Tensor:
    if criterion.tolerance is None:
        return torch.full_like(size, 0.0 if criterion.sqnr is None else math.inf)
    finite = torch.where(size.isfinite(), size, 0.0)
    rtol, atol = criterion.tolerance.rtol, criterion.tolerance.atol
    if magnitudes is None:
        return atol + rtol * finite
    scale = magnitudes.scales(of_zeros=of_zeros).to(size.device)[magnitudes.bins].reshape(size.shape)
    return atol * scale.clamp_min(1.0) + rtol * torch.maximum(finite, scale)


def _coarse(magnitudes: Magnitudes, error: Tensor, own: Tensor | None, eps: float) -> dict[int, float]:
    """Return rms(a - b) / s of the elements of each magnitude at which it is too large for any scale."""
    noise = magnitudes.per_power(error)
    rounding = None if own is None else magnitudes.per_power(own)
    scales = magnitudes.scales(of_zeros=False).tolist()
    found: dict[int, float] = {}
    for number, near, count in magnitudes.windows():
        scale = scales[number]
        ratio = math.sqrt(noise.squares[near].sum() / count) / scale if scale else 0.0
        exact = rounding is not None and math.sqrt(rounding.squares[near].sum() / count) <= _EXACT * scale
        matters = scale > _SUBNORMAL and (exact or scale > _NOISE * eps)
        if ratio > _COARSE and matters and magnitudes.is_many(count):
            found[number] = ratio
    return found
