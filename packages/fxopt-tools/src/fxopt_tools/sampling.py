"""How long modules take, compared in one run: in rounds, each with all of them, in an order that is drawn anew.

`fxopt_core.speed` says how times of the same rounds are compared.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from fxopt_core import PreconditionError
from fxopt_core.speed import (
    CONFIDENCE,
    FEWEST_ROUNDS,
    Ratio as Ratio,
    Times as Times,
    interval as interval,
    noise_of as noise_of,
)
from fxopt_tools.inputs import Inputs, OneInput, copied, read_inputs

_WARM_UP = 3
_MOST_CALLS = 1000


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
