"""How long modules take, compared in one run: in rounds, each with all of them, in an order that is drawn anew.

What a machine does beside is much the same within a round, so that ratios within rounds tell more than times do. A
ratio is stated as the median over the rounds, with the interval that holds the true median with a confidence of 99 %,
by order statistics: nothing is assumed of how times are distributed.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fxopt_core import PreconditionError
from fxopt_tools.inputs import Inputs, OneInput, copied, read_inputs

CONFIDENCE = 0.99
FEWEST_ROUNDS = 8  # of fewer, not even the extremes hold the median with that confidence
_WARM_UP = 3
_MOST_CALLS = 1000


@dataclass(frozen=True)
class Times:
    """The times of one module, in seconds for each call, round by round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The distance of the quartiles."""
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return third - first

    def __str__(self) -> str:
        """Return median and spread in milliseconds."""
        return f"{self.median * 1e3:.4g} ms, spread {self.spread * 1e3:.2g} ms"


@dataclass(frozen=True)
class Ratio:
    """How many times longer one module takes than another one, over rounds.

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
        """Return that of times of the same rounds.

        >>> Ratio.of(Times((2.0, 4.0) * 4), Times((1.0, 2.0) * 4))
        Ratio(median=2.0, low=2.0, high=2.0)
        """
        ratios = [one / other for one, other in zip(slow.seconds, fast.seconds, strict=True)]
        return cls(statistics.median(ratios), *interval(ratios))

    def against(self, noise: float) -> Literal["faster", "slower", "within noise"]:
        """Return what it says of the other module: the interval has to leave 1 out, the median to exceed the noise."""
        if self.low > 1 and self.median > 1 + noise:
            return "faster"
        return "slower" if self.high < 1 and self.median < 1 / (1 + noise) else "within noise"

    def __str__(self) -> str:
        """Return median and interval."""
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an interval that holds the median of what values are drawn from, with a confidence of 99 %.

    >>> interval(range(1, 31))
    (8, 23)
    """
    number = len(values)
    outside, rank = 0.0, 0  # how probable it is that fewer than `rank` values are below the median
    while outside + math.comb(number, rank) / 2**number <= (1 - CONFIDENCE) / 2:
        outside += math.comb(number, rank) / 2**number
        rank += 1
    ordered = sorted(values)
    return ordered[max(rank, 1) - 1], ordered[number - max(rank, 1)]


def noise_of(ratio: Ratio) -> float:
    """Return how far from 1 the ratio of two equal modules is: the further end of its interval."""
    return max(ratio.high, 1 / ratio.low) - 1


class Sampler:
    """Measures modules on inputs.

    Args:
        inputs: as for `verify`; one call of a module is a call on each of them.
        rounds: how often each module is measured.
        clock: returns seconds.
        seed: of the order within rounds.
        sample_seconds: how long one measurement takes at least; short calls are repeated.

    Raises:
        PreconditionError: Inputs or numbers make no sense.
    """

    def __init__(
        self,
        inputs: OneInput | Sequence[OneInput],
        *,
        rounds: int,
        clock: Callable[[], float] = time.perf_counter,
        seed: int = 0,
        sample_seconds: float = 0.005,
    ) -> None:
        if type(rounds) is not int or rounds < FEWEST_ROUNDS:
            raise PreconditionError(
                f"rounds is {rounds!r}, expected a number from {FEWEST_ROUNDS}: fewer tell nothing with a confidence "
                f"of {CONFIDENCE:.0%}"
            )
        self._inputs = read_inputs(inputs)
        self._rounds, self._clock, self._sample_seconds = rounds, clock, sample_seconds
        self._random = random.Random(seed)

    def measure(self, *modules: nn.Module) -> list[Times]:
        """Return the times of modules, measured in the same rounds.

        Raises:
            PreconditionError: A module refuses the inputs.
        """
        writes, shortest = False, math.inf
        for module in modules:
            for _ in range(_WARM_UP):
                seconds, wrote = self._warm_up(module)
                writes, shortest = writes or wrote, min(shortest, seconds)
        calls = math.ceil(self._sample_seconds / shortest) if shortest > 0 else _MOST_CALLS
        calls = 1 if writes else max(1, min(calls, _MOST_CALLS))  # what a call writes would be the next one's input
        found: list[list[float]] = [[] for _ in modules]
        order = list(range(len(modules)))
        for _ in range(self._rounds):
            self._random.shuffle(order)
            for place in order:
                found[place].append(self._sample(modules[place], calls)[0])
        return [Times(tuple(seconds)) for seconds in found]

    def _warm_up(self, module: nn.Module) -> tuple[float, bool]:
        try:
            return self._sample(module, 1)
        except PreconditionError:
            raise
        except Exception as error:
            raise PreconditionError(
                f"the model refuses the inputs: {type(error).__name__}: {error}. Expected inputs that it can be called "
                "with"
            ) from error

    def _sample(self, module: nn.Module, calls: int) -> tuple[float, bool]:
        """Return the seconds of one call, and whether it wrote into its inputs, which are copies."""
        copies = [copied(item) for item in self._inputs]
        waits = _waiting(module, self._inputs)
        with torch.no_grad():
            waits()
            started = self._clock()
            for _ in range(calls):
                for each in copies:
                    module(*each.inputs.args, **each.inputs.kwargs)
            waits()
            seconds = self._clock() - started
        return seconds / calls, any(each.touched() for each in copies)


def _waiting(module: nn.Module, inputs: Sequence[Inputs]) -> Callable[[], object]:
    """Return what waits until a device has done its work; nothing where all is on the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    tensors = [*module.parameters(), *module.buffers(), *(t for item in inputs for t in item.tensors().values())]
    if accelerator is not None and any(tensor.device.type == accelerator.type for tensor in tensors):
        return torch.accelerator.synchronize
    return lambda: None
