"""Foreign code under watch: a slow plugin is named, and an interrupt from outside is not taken for its error."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PATIENCE = 5.0  # seconds after which a plugin that is still being loaded is named


@contextmanager
def noting_interrupts() -> Iterator[list[BaseException]]:
    """Give the list of what signal handlers raise in the ``with`` block, which others may take for errors of their own.

    Handlers, Ctrl-C's too, run in the main thread. What code raises itself comes from none.
    """
    raised: list[BaseException] = []
    numbers = signal.valid_signals() if threading.current_thread() is threading.main_thread() else ()
    former = {int(number): found for number in numbers if callable(found := signal.getsignal(number))}

    def noted(number: int, frame: FrameType | None) -> None:
        try:
            former[number](number, frame)
        except BaseException as error:
            raised.append(error)
            raise

    try:
        for number in former:
            signal.signal(number, noted)
        yield raised
    finally:
        for number, handler in former.items():
            if signal.getsignal(number) is noted:  # else the block has set one of its own
                signal.signal(number, handler)


@contextmanager
def watched(plugin: str) -> Iterator[list[BaseException]]:
    """Do as `noting_interrupts`, and warn if the block takes long."""
    text = f"{plugin} is still being loaded after {PATIENCE:g} s; FXOPT_PLUGINS can leave it out"
    timer = threading.Timer(PATIENCE, warnings.warn, (text, RuntimeWarning))
    timer.daemon = True
    timer.start()
    try:
        with noting_interrupts() as raised:
            yield raised
    finally:
        timer.cancel()
