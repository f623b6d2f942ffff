"""How long an export may take that lets sizes vary without being asked to."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

# Measured: an export that never ends (DaViT, with few guards) spends 80 % on expressions, nine others below 30 %.
FLOOR, TIMES = 5.0, 3.0
"""Seconds that any export may spend on expressions of sizes; how many times the rest of it all of it may take."""


class OverBudgetError(Exception):
    """An export takes too long."""


class Budget:
    """The processor time of one export in this thread, of which other processes take none.

    What it takes beside the work on expressions of sizes is about what an export with fixed sizes takes. Where sizes
    become expressions that take minutes to simplify, or for ever, the export is given up.

    >>> budget = Budget()
    >>> budget.counted(max)(1, 2)
    2
    """

    def __init__(self) -> None:
        self._thread, self._start = threading.get_ident(), time.thread_time()
        self._spent, self._since = 0.0, 0.0

    def counted(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does some work on expressions, perhaps within such work, and counts its time.

        It raises an `OverBudgetError` if this thread, being that of the export, has used up its time.
        """

        @functools.wraps(work)  # whose attributes torch uses
        def counting(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return work(*args, **kwargs)
            now = time.thread_time()
            spent = self._spent + (now - self._since if self._since else 0.0)
            if spent > FLOOR and now - self._start > TIMES * (now - self._start - spent):
                raise OverBudgetError(f"torch.export has spent {spent:.0f} s on expressions of sizes that vary")
            if self._since:
                return work(*args, **kwargs)
            self._since = now
            try:
                return work(*args, **kwargs)
            finally:
                self._spent += time.thread_time() - self._since
                self._since = 0.0

        return counting
