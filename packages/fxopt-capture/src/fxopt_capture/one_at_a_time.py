"""One capture at a time, and interrupts that stay interrupts.

While ``torch.export`` traces a model, functions of torch are replaced for the whole process, and the model has another
``forward``. Two threads at once would meet each other's replacements.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fxopt_core.errors import halted_by

_lock = threading.RLock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Keep other threads out of blocks like this one; they wait, and a wait can be interrupted.

    An interrupt that torch has wrapped in an error of its own is raised as an interrupt. Signal handlers of the process
    are not replaced.
    """
    handled = sys.exc_info()[1]
    with _lock:
        try:
            yield
        except Exception as error:
            raise_interrupt(error, handled)
            raise


def raise_interrupt(error: BaseException, handled: BaseException | None = None) -> None:
    """Raise the interrupt that led to an error, if one did; `handled` is what the caller was handling before."""
    interrupt = halted_by(error, handled)
    if interrupt is not None:
        raise interrupt from None


def _fresh_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # in a child process, no other thread is left to release it
    os.register_at_fork(after_in_child=_fresh_lock)
