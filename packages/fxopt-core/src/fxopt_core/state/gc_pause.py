"""Keeping the garbage collector out of the way of code that makes many objects at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 5_000
"""Up to so many young objects are collected in less than a tenth of a millisecond."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the garbage collector from running while many small objects are made that all stay alive.

    Freezing and unfreezing moves them to the oldest generation in no time; without it, the first collection of the
    young ones afterwards takes as long as the recording. Whoever has frozen objects themselves is left alone: to find
    that out takes time in proportion to what is frozen, so that it is asked only where many objects were made.
    """
    was_running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_running:
            if gc.get_count()[0] > MANY and gc.get_freeze_count() == 0:
                gc.freeze()
                gc.unfreeze()
            gc.enable()
