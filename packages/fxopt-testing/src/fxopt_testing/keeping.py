"""`process_kept`: what a pass may change in the process is as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def process_kept() -> Iterator[None]:
    """Bring grad mode, default dtype and random state back at the end, so that one check disturbs no other."""
    was = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_grad_enabled(was[0])
        torch.set_default_dtype(was[1])
        torch.set_rng_state(was[2])
