"""Two ways to compute something are compared, by a clock that the test winds: nothing depends on the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

import pytest
import torch

from fxopt_tools.speed import (
    compare_speed,
    processors,
)

CPU = torch.device("cpu")


class Clock:
    """Stands still but for what runs."""

    def __init__(self, drift: float = 0.0) -> None:
        self.now, self.drift, self.calls = 0.0, drift, 0

    def __call__(self) -> float:
        return self.now

    def taking(self, *seconds: float) -> Callable[[], object]:
        """Return a computation that takes these times in turn."""

        def run() -> None:
            self.now += seconds[self.calls % len(seconds)] * (1 + self.drift * self.calls)
            self.calls += 1

        return run


@pytest.mark.parametrize(
    ("former", "new", "verdict"), [(2.0, 1.0, "faster"), (1.0, 2.0, "slower"), (1.0, 1.0, "within noise")]
)
def test_what_is_faster(former: float, new: float, verdict: str) -> None:
    clock = Clock()
    found = compare_speed(clock.taking(former), clock.taking(new), CPU, clock=clock)
    assert found.verdict == verdict
    assert found.ratio.median == pytest.approx(former / new)
    assert found.noise == pytest.approx(0)


def test_a_drift_of_all_times_is_no_benefit() -> None:
    clock = Clock(drift=0.05)
    assert compare_speed(clock.taking(1.0), clock.taking(1.0), CPU, clock=clock).verdict == "within noise"


def test_noise_hides_a_small_benefit() -> None:
    clock = Clock()
    found = compare_speed(clock.taking(1.0, 3.0, 1.5, 2.0, 2.5), clock.taking(1.8), CPU, clock=clock, rounds=9)
    assert found.noise > 0.2
    assert found.verdict == "within noise"


def test_short_calls_are_repeated_and_long_ones_not() -> None:
    for seconds, calls in ((1e-5, 50), (1.0, 1)):
        clock = Clock()
        way = clock.taking(seconds)
        compare_speed(way, way, CPU, clock=clock, rounds=8, sample_seconds=5e-4)
        assert clock.calls == pytest.approx(3 * (2 + 8 * calls), abs=3 * 8)


def test_a_clock_that_stands_still_divides_by_nothing() -> None:
    assert compare_speed(lambda: None, lambda: None, CPU, clock=lambda: 0.0, rounds=8).verdict == "within noise"


def test_gradients_are_off() -> None:
    seen: list[bool] = []
    compare_speed(lambda: seen.append(torch.is_grad_enabled()), lambda: None, CPU, rounds=8)
    assert set(seen) == {False}
    assert torch.is_grad_enabled()


def test_the_same_seed_gives_the_same_order() -> None:
    def order(seed: int) -> list[str]:
        ran: list[str] = []
        clock = Clock()
        takes = clock.taking(1.0)

        def noting(name: str) -> Callable[[], object]:
            def run() -> None:
                ran.append(name)
                takes()

            return run

        compare_speed(noting("former"), noting("new"), CPU, rounds=8, clock=clock, seed=seed)
        return ran

    assert order(1) == order(1) != order(2)


def test_more_threads_than_processors_are_no_measurement() -> None:
    """Whatever the clock says, and the share of the process beside it."""
    before = torch.get_num_threads()
    torch.set_num_threads(processors() + 1)
    try:
        found = compare_speed(lambda: None, lambda: None, torch.device("cpu"), rounds=8, clock=count(1).__next__)
    finally:
        torch.set_num_threads(before)
    assert str(found) == f"not measured: {processors() + 1} threads share {processors()} processors"
    assert found.verdict == "within noise"


def test_a_process_that_waits_is_no_measurement() -> None:
    """A sleeping process stands for one that others keep from the processors."""
    found = compare_speed(lambda: time.sleep(0.01), lambda: time.sleep(0.01), torch.device("cpu"), rounds=8)
    assert found.doubt is not None and "the process had a processor for" in found.doubt
