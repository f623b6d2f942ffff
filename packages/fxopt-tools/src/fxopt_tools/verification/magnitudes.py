"""The magnitudes of a tensor's elements, by powers of two, so that ordinary ones are not measured by extreme ones.

The scale of an element is m / F, where m is the largest magnitude between the same two powers of two, and F the share
of elements that are no larger. If magnitudes are spread as in a normal distribution, the scale is close to the standard
deviation for all but the largest elements, and for those it is their own magnitude: near zero, such a distribution has
few elements, in proportion to their size. A large group of small elements has its own scale, however large the others
are: if 70 % of the scores are masked with -1e9, the others have 1 / 0.3 of their own size; likewise if one half is a
million times larger than the other.

A few elements may be small by chance. A scale needs at least eight elements (or an eighth of a small tensor): with
fewer it is that of the next larger ones, unless a gap of a factor of 256 lies between. The share F refers to the
elements up to such a gap, or up to a gap of 128 above enough of them. Zeros have no magnitude.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

_LOWEST = 1074  # of float64, whose smallest magnitude is 2 ** -1074
# `frexp` gives exponents from -1073 to 1024, which are bins 1 to 2098; bin 0 is for zeros and non-finite elements.
_BINS = _LOWEST + 1024 + 1
# Eight elements, or an eighth of those of a small tensor, are not small merely by chance.
_COMPANY = 8
_GAP = 8
# Within how many powers of two elements are comparable: a factor of 32, or of 256 where there are few.
_NEAR, _FAR = 5, 8
_GROUP = 64


class Sums(NamedTuple):
    """Of some values, for each power of two: the sum of their squares, that of fourth powers, and the largest."""

    squares: Tensor
    fourths: Tensor
    largest: Tensor


class Magnitudes:
    """The elements of a tensor by power of two.

    Attributes:
        bins: for each element the number of its power of two, 0 for zeros and non-finite elements.
        present: the numbers of nonzero powers that occur, in order.
        total: how many elements are finite and not zero.
    """

    def __init__(self, size: Tensor) -> None:
        """Sort elements, given their magnitudes in float64."""
        nonzero = (size > 0) & size.isfinite()
        self.bins = torch.where(nonzero, torch.frexp(torch.where(nonzero, size, 1.0)).exponent + _LOWEST, 0).flatten()
        self._counts: list[int] = self.count(self.bins >= 0)
        self.present = [number for number in range(1, _BINS) if self._counts[number]]
        self._largest: list[float] = self._most(torch.where(nonzero, size, 0.0).flatten()).tolist()
        self._up_to = list(accumulate(self._counts[number] for number in self.present))
        self.total = self._up_to[-1] if self._up_to else 0

    def count(self, chosen: Tensor) -> list[int]:
        """Return how many of the chosen elements each power has."""
        counts: list[int] = torch.bincount(self.bins[chosen.flatten()], minlength=_BINS).tolist()
        return counts

    def scales(self, *, of_zeros: bool) -> Tensor:
        """Return the scale of each power; 0 for zeros, or that of the smallest elements if these are few."""
        found = [0.0] * _BINS
        company = min(max(self.total // _COMPANY, 1), _COMPANY)
        above: int | None = None
        total = self.total
        for number, up_to in zip(reversed(self.present), reversed(self._up_to), strict=True):
            gap = _BINS if above is None else above - number
            total = up_to if gap >= _GAP - 1 and up_to >= company else total
            # m / F, with the share F = up_to / total.
            own = min(self._largest[number] * (total / up_to), sys.float_info.max)
            found[number] = own if up_to >= company or gap > _GAP or above is None else found[above]
            above = number
        if of_zeros and self.present and self._up_to[0] * _COMPANY <= self.total:
            found[0] = found[self.present[0]]
        return torch.tensor(found, dtype=torch.float64)

    def is_many(self, count: int) -> bool:
        """Return whether this many elements are enough to judge them together."""
        return count >= min(max(self.total / _GROUP, _COMPANY), self.total)

    def windows(self) -> Iterator[tuple[int, list[int], int]]:
        """Yield each power that occurs, the powers of comparable elements, and how many elements these have.

        Comparable are those within a factor of 32, or of 256 if there are fewer than eight of them. Zeros are half as
        large as the smallest element.
        """
        places = {number: number for number in self.present}
        if self._counts[0]:
            places = {0: self.present[0] - 1 if self.present else 0, **places}
        for number, place in places.items():
            for reach in range(_NEAR, _FAR + 1):
                near = [other for other, at in places.items() if abs(at - place) <= reach]
                size = sum(self._counts[other] for other in near)
                if size >= _COMPANY:
                    break
            yield number, near, size

    def cuts(self) -> list[float]:
        """Return the magnitudes at which a gap separates a group of elements from larger ones, and infinity."""
        least = max(2, self.total / _GROUP)
        triples = zip(self.present, self.present[1:], self._up_to, strict=False)
        cuts = (math.ldexp(1, one - _LOWEST) for one, other, n in triples if other - one >= _GAP and n >= least)
        return [*cuts, math.inf]

    def per_power(self, values: Tensor) -> Sums:
        """Return the sums over some values for each power."""
        flat = values.detach().flatten().clamp_max(1e75)  # its fourth power is finite
        powers = flat.square(), flat.square().square()
        squares, fourths = (torch.bincount(self.bins, each, minlength=_BINS) for each in powers)
        return Sums(squares, fourths, self._most(flat))

    def _most(self, values: Tensor) -> Tensor:
        """Return the largest of some values for each power."""
        largest = torch.zeros(_BINS, dtype=torch.float64, device=values.device)
        return largest.scatter_reduce_(0, self.bins.long(), values, "amax")
