"""A time limit for exports whose sizes vary although the caller has not asked for it."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

# Measured: an export that never ends (DaViT, with few guards) spends 80 % on expressions, nine others below 30 %.
# An alarm would belong to the whole process, and the number of guards does not set such models apart.
#: Seconds that any export may spend on expressions of sizes; the limit of its total time, in multiples of the rest.
FLOOR, TIMES = 5.0, 3.0


class OverBudgetError(Exception):
    """An export takes too long."""


class Budget:
    """The processor time of one export in this thread, which is independent of other processes.

    Without the work on expressions of sizes, an export takes about as long as one with fixed sizes. If sizes become
    expressions that take minutes to simplify, or for ever, the export is given up.

    >>> budget = Budget()
    >>> budget.counted(max)(1, 2)
    2
    """

    def __init__(self) -> None:
        self._thread, self._start = threading.get_ident(), time.thread_time()
        self._spent, self._since = 0.0, 0.0

    def counted(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``work`` as a function that counts the time it takes; calls may be nested.

        It raises an `OverBudgetError` if the thread of the export has used up its time.
        """

        @functools.wraps(work)  # whose attributes torch uses
        def counting(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return work(*args, **kwargs)
            now = time.thread_time()
            spent = self._spent + (now - self._since if self._since else 0.0)
            if spent > FLOOR and now - self._start > TIMES * (now - self._start - spent):
                raise OverBudgetError(f"torch.export has spent {spent:.0f} s on expressions of sizes that vary")
            # Within another such call, which counts the time of this one.
            if self._since:
                return work(*args, **kwargs)
            self._since = now
            try:
                return work(*args, **kwargs)
            finally:
                self._spent += time.thread_time() - self._since
                self._since = 0.0

        return counting
