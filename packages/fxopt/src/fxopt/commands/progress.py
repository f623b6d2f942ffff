"""Progress with the time that is left, for work that consists of a few long steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text


class Estimate:
    """How long the remaining steps take, judged by those that are over.

    Args:
        seconds: the steps in order, with the seconds that each takes about.
        clock: returns seconds.

    >>> now = 0.0
    >>> estimate = Estimate({"read": 1.0, "capture": 4.0}, clock=lambda: now)
    >>> estimate.begin("read")
    >>> estimate.left()
    5.0
    >>> now = 2.0
    >>> estimate.begin("capture")  # reading took twice as long as expected, so the rest will
    >>> estimate.left(), estimate.done
    (8.0, 0.2)
    """

    def __init__(self, seconds: Mapping[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = dict(seconds)
        self._clock = clock
        self._started = self._step_started = clock()
        self._over = 0.0
        self._current = 0.0
        self._part = 0.0

    @property
    def done(self) -> float:
        """The part of the whole that is over, from 0 to 1."""
        return (self._over + self._part * self._current) / (sum(self._seconds.values()) or 1.0)

    def begin(self, step: str) -> None:
        """Note that a step begins, and that those before it are over."""
        names = list(self._seconds)
        self._over = sum(self._seconds[name] for name in names[: names.index(step)])
        self._current = self._seconds[step]
        self._part = 0.0
        self._step_started = self._clock()

    def part(self, part: float) -> None:
        """Note which part of the present step is over, from 0 to 1."""
        self._part = part

    def left(self) -> float:
        """Return the seconds that are left, and 0 where the last step takes longer than expected."""
        pace = (self._step_started - self._started) / self._over if self._over else 1.0
        after = sum(self._seconds.values()) - self._over - self._current
        elapsed = self._clock() - self._step_started
        expected = elapsed / self._part if self._part else self._current * pace
        return max(0.0, expected - elapsed) + after * pace


class Steps:
    """Announces steps to nobody."""

    def __call__(self, step: str) -> None:
        """Say that a step begins."""

    def part(self, done: int, total: int) -> None:
        """Say how much of the present step is over."""


class _ShownSteps(Steps):
    """Announces steps to a progress bar."""

    def __init__(self, progress: Progress, task: TaskID, estimate: Estimate) -> None:
        self._progress, self._task, self._estimate = progress, task, estimate

    def __call__(self, step: str) -> None:
        self._estimate.begin(step)
        self._progress.update(self._task, completed=self._estimate.done, description=step, refresh=True)

    def part(self, done: int, total: int) -> None:
        self._estimate.part(done / total)
        self._progress.update(self._task, completed=self._estimate.done)


class _TimeLeft(ProgressColumn):
    """A column with the time that is left; it counts down within a step."""

    def __init__(self, estimate: Estimate) -> None:
        super().__init__()
        self._estimate = estimate

    def render(self, task: Task) -> Text:
        """Return the text."""
        seconds = round(self._estimate.left())
        text = f"about {seconds // 60}:{seconds % 60:02} left" if seconds else "nearly done"
        return Text(text, style="progress.remaining")


@contextmanager
def steps_shown(console: Console, seconds: Mapping[str, float]) -> Iterator[Steps]:
    """Show progress through steps while the ``with`` block works; yield what announces each.

    Args:
        console: a terminal.
        seconds: the steps in order, with the seconds that each takes about.
    """
    estimate = Estimate(seconds)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        _TimeLeft(estimate),
    )
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as progress:
        yield _ShownSteps(progress, progress.add_task("", total=1.0), estimate)


@contextmanager
def silent() -> Iterator[Steps]:
    """Yield what takes announcements and shows nothing."""
    yield Steps()
