"""Which of two ways to compute something is faster on this machine, beyond noise.

Other load on the machine is about the same within a round, so ratios within rounds are more reliable than times. A
ratio is the median over the rounds, with a 99 % confidence interval by order statistics, which assume no distribution.

`doubt` reports when such numbers are worthless, because the machine was busy or had too few processors.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

#: The probability with which the interval of a ratio contains its true median.
CONFIDENCE = 0.99
FEWEST_ROUNDS = 8  # with fewer, not even the extremes enclose the median with this confidence
LARGEST_SPREAD = 0.5  # relative to the median; on quiet machines it is 0.03 to 0.15
LARGEST_NOISE = 0.5
LEAST_SHARE = 0.8  # of the time that the process has a processor; with less, it had to wait
SHORTEST = 1e-12  # seconds, if a clock is too coarse

Verdict = Literal["faster", "slower", "within noise"]


@dataclass(frozen=True)
class Times:
    """The times of one way to compute something.

    Attributes:
        seconds: seconds per call, for each round.
        share: processor seconds per second, while all ways of these rounds were measured; None if unknown.
    """

    seconds: tuple[float, ...]
    share: float | None = None

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The interquartile range."""
        if len(self.seconds) < 2:
            return 0.0
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return third - first

    def __str__(self) -> str:
        return f"{self.median * 1e3:.4g} ms, spread {self.spread * 1e3:.2g} ms"


@dataclass(frozen=True)
class Ratio:
    """How many times longer one way takes than another.

    Attributes:
        median: the median.
        low: lower end of its interval.
        high: upper end of its interval.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, slow: Times, fast: Times) -> Ratio:
        """Return the ratio of times from the same rounds.

        >>> Ratio.of(Times((2.0, 4.0) * 4), Times((1.0, 2.0) * 4))
        Ratio(median=2.0, low=2.0, high=2.0)
        """
        ratios = [one / other for one, other in zip(slow.seconds, fast.seconds, strict=True)]
        return cls(statistics.median(ratios), *interval(ratios))

    def against(self, noise: float) -> Verdict:
        """Return the verdict on the other way: the interval has to exclude 1, and the median to exceed the noise."""
        if self.low > 1 and self.median > 1 + noise:
            return "faster"
        # The inverse, since a ratio of 1 / 1.25 is as far from 1 as one of 1.25.
        return "slower" if self.high < 1 and self.median < 1 / (1 + noise) else "within noise"

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 99 % confidence interval of the median of the distribution from which values were drawn.

    >>> interval(range(1, 31))
    (8, 23)
    """
    number = len(values)
    # How many values lie below the median follows a binomial distribution with probability 1/2.
    outside, rank = 0.0, 0  # how probable it is that fewer than `rank` values are below the median
    while outside + math.comb(number, rank) / 2**number <= (1 - CONFIDENCE) / 2:
        outside += math.comb(number, rank) / 2**number
        rank += 1
    ordered = sorted(values)
    return ordered[max(rank, 1) - 1], ordered[number - max(rank, 1)]


def processors() -> int:
    """Return how many processors this process may use."""
    # `cpu_count` includes processors that this process is not allowed to use.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def doubt(times: Sequence[Times], noise: float = 0.0) -> str | None:
    """Return why times from the same rounds are worthless, so that they give no ratio and no advice; else None.

    >>> doubt([Times((1.0,) * 8), Times((1.0, 3.0) * 4)])
    'the times of one way spread by 100 % of their median'
    >>> doubt([Times((1.0,) * 8, share=0.4)])
    'the process had a processor for 40 % of the time'
    """
    spread = max(each.spread / max(each.median, SHORTEST) for each in times)
    share = min((each.share for each in times if each.share is not None), default=1.0)
    reasons = []
    if torch.get_num_threads() > processors():
        reasons.append(f"{torch.get_num_threads()} threads share {processors()} processors")
    if share < LEAST_SHARE:
        reasons.append(f"the process had a processor for {share * 100:.0f} % of the time")
    if spread > LARGEST_SPREAD:
        reasons.append(f"the times of one way spread by {spread * 100:.0f} % of their median")
    if noise > LARGEST_NOISE:
        reasons.append(f"two copies of the original differ by {noise * 100:.0f} %")
    return ", and ".join(reasons) or None


def share_since_now(clock: Callable[[], float]) -> Callable[[], float | None]:
    """Return a function for the share of the time since now for which this process had processors.

    It is in processor seconds per second; None if the clock is not real time, or there is an accelerator, for which a
    process may wait.
    """
    if clock is not time.perf_counter or torch.accelerator.is_available():
        return lambda: None
    started, worked = time.perf_counter(), time.process_time()
    return lambda: (time.process_time() - worked) / max(time.perf_counter() - started, SHORTEST)


def noise_of(ratio: Ratio) -> float:
    """Return how far from 1 the ratio of two equal ways may be: the distance to the further end of its interval."""
    return max(ratio.high, 1 / ratio.low) - 1
