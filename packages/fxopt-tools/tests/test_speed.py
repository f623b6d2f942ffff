"""When times are no measurement, whatever they are."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from fxopt_tools.bench import Sampler
from fxopt_tools.speed import Times, doubt, processors


def test_more_threads_than_processors_are_no_measurement() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(processors() + 1)
    try:
        found = doubt([Times((1.0,) * 8)])
    finally:
        torch.set_num_threads(before)
    assert found == f"{processors() + 1} threads share {processors()} processors"


class Sleeps(nn.Module):
    """Waits."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        return x


def test_a_process_that_waits_is_no_measurement() -> None:
    """A sleeping process stands for one that others keep from the processors."""
    found = doubt(Sampler(torch.ones(2), rounds=8).measure(Sleeps(), Sleeps()))
    assert found is not None and "the process had a processor for" in found
