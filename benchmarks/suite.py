"""The tools of every topic: settings, tables of cells, and timers that treat all peers alike.

A topic yields tables. A row of a table is a list of cells: text, a whole number, a `Measured` value with its unit and
spread, or `Absent` with the reason why there is none. Candidates are measured in the same rounds, each in a
new random order, so that the machine's other work affects all alike: in one process, or, where
engines have pools of threads, each in its own (`benchmarks.apart`).
"""

from __future__ import annotations

import gc
import math
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from time import perf_counter, process_time

import torch

Clock = Callable[[], float]
Task = Callable[[], object]
Seconds = Mapping[str, tuple[float, ...]]
"""The seconds of each candidate, round by round."""


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        quick: small models and few rounds, to see that everything runs; the numbers mean nothing.
        rounds: how often each candidate is measured.
        threads: the threads of torch and its peers on the CPU.
        seed: the seed of the order within rounds.
        only: words, one of which a table's title must have, for topics with many tables; none for all tables.
        seconds: how long one pass of a row may take, for topics that choose how much they do.
        known: tables by title that need not be measured again.
        busy: measure processor seconds of one thread, because seconds would include the machine's other work.
    """

    quick: bool = False
    rounds: int = 30
    threads: int = 2
    seed: int = 0
    busy: bool = False
    only: tuple[str, ...] = ()
    seconds: float = 1.0
    known: Mapping[str, Table] = field(default_factory=dict)

    def wants(self, title: str) -> bool:
        """Return whether a table is asked for."""
        return not self.only or any(word.lower() in title.lower() for word in self.only)

    @property
    def clock(self) -> Clock:
        """The clock that measures repeated work."""
        return process_time if self.busy else perf_counter

    @property
    def note(self) -> str:
        """A note for tables about how seconds are measured."""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return "CPU time of one thread." if self.busy else f"{threads}."

    def fewer_rounds(self, most: int) -> int:
        """Return the number of rounds for slow tasks: at most `most`."""
        return min(self.rounds, most)


@dataclass(frozen=True)
class Measured:
    """A median with the quartiles, or a single value where these are None.

    Attributes:
        median: the value.
        unit: "s", "B", "x" (a ratio), "" (a number).
        low: the first quartile.
        high: the third quartile.
    """

    median: float
    unit: str = "s"
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, values: Sequence[float], unit: str = "s") -> Measured:
        """Return the median of values, with quartiles from three values on.

        >>> Measured.of([1.0, 2.0, 3.0, 4.0, 5.0])
        Measured(median=3.0, unit='s', low=2.0, high=4.0)
        """
        if len(values) < 3:
            return cls(median(values), unit)
        low, middle, high = quantiles(values, n=4, method="inclusive")
        return cls(middle, unit, low, high)

    @property
    def spread(self) -> float:
        """The quartiles' distance over the median; 0 where there are none.

        >>> Measured(4.0, "s", 3.5, 4.5).spread
        0.25
        """
        return 0.0 if self.low is None or self.high is None else (self.high - self.low) / self.median

    def steady(self, most: float = 0.15) -> Measured | Absent:
        """Return the value, or an `Absent` where it spreads too far."""
        return self if self.spread <= most else Absent(f"spread {self.spread:.0%}")

    @classmethod
    def ratio(cls, slow: Sequence[float], fast: Sequence[float]) -> Measured:
        """Return how many times longer the one took, round by round.

        >>> Measured.ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
        Measured(median=2.0, unit='x', low=2.0, high=2.0)
        """
        return cls.of([one / other for one, other in zip(slow, fast, strict=True)], "x")


@dataclass(frozen=True)
class Absent:
    """A missing value.

    Attributes:
        reason: why, in a few words: "not installed", "RuntimeError: expects 4-D input".
    """

    reason: str

    @classmethod
    def because(cls, error: BaseException) -> Absent:
        """Return one for an error: its type and the first line of its message, at most 100 characters."""
        line = next(iter(str(error).strip().splitlines()), "")
        return cls(f"{type(error).__name__}: {line}"[:100].rstrip(": "))


Cell = str | int | Measured | Absent


@dataclass(frozen=True)
class Row:
    """A line of a table.

    Attributes:
        label: what was measured; the first cell.
        cells: the others.
    """

    label: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """A table of results.

    Attributes:
        title: its heading.
        columns: headings of all columns, that of the labels first.
        rows: its lines, each with as many cells as there are columns.
        text: a paragraph of Markdown before it: what was measured, how, and what to read from it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    text: str = ""

    def __post_init__(self) -> None:
        """Check that all lines are complete.

        Raises:
            ValueError: One is not.
        """
        for row in self.rows:
            if len(row.cells) + 1 != len(self.columns):
                raise ValueError(
                    f"row {row.label!r} of table {self.title!r} has {len(row.cells) + 1} cells, expected "
                    f"{len(self.columns)}: {', '.join(self.columns)}"
                )

    def beside(self, earlier: Table | None) -> Table:
        """Return the table with those rows of an earlier one that were not measured again."""
        if earlier is None or earlier.columns != self.columns:
            return self
        rows = {row.label: row for row in (*earlier.rows, *self.rows)}
        return replace(self, rows=tuple(rows.values()))


Topic = Callable[[Settings], Iterable[Table]]


def shuffled_rounds(
    tasks: Mapping[str, Task],
    rounds: int,
    *,
    sample_seconds: float = 0.02,
    warm_up: int = 3,
    clock: Clock = perf_counter,
    seed: int = 0,
) -> Seconds:
    """Measure tasks that may be repeated, such as calls of models; return the seconds of one call.

    Every task is called `warm_up` times first. Then each round calls each as often as it takes for about
    `sample_seconds`, without gradients.

    Args:
        tasks: by name.
        rounds: how often each is measured.
        sample_seconds: how long one measurement takes at least.
        warm_up: how many calls are not counted.
        clock: returns seconds.
        seed: of the order within rounds.
    """
    calls: dict[str, int] = {}
    found: dict[str, list[float]] = {name: [] for name in tasks}
    with torch.no_grad():
        for name, task in tasks.items():
            shortest = min(_seconds(task, 1, clock) for _ in range(max(1, warm_up)))
            calls[name] = max(1, min(1000, math.ceil(sample_seconds / max(shortest, 1e-9))))
        for name in _order(tasks, rounds, seed):
            found[name].append(_seconds(tasks[name], calls[name], clock))
    return {name: tuple(seconds) for name, seconds in found.items()}


def shuffled_once(
    makers: Mapping[str, Callable[[], Task]],
    rounds: int,
    *,
    warm_up: int = 1,
    clock: Clock = perf_counter,
    seed: int = 0,
) -> Seconds:
    """Measure tasks that can run only once, such as transforming a graph; return their seconds.

    Args:
        makers: functions that make each task anew; only the task is measured.
        rounds: how often each is measured.
        warm_up: how many rounds are not counted.
        clock: returns seconds.
        seed: of the order within rounds.
    """
    found: dict[str, list[float]] = {name: [] for name in makers}
    for name in _order(makers, rounds + warm_up, seed):
        task = makers[name]()
        gc.collect()
        found[name].append(_seconds(task, 1, clock))
        del task
    return {name: tuple(seconds[warm_up:]) for name, seconds in found.items()}


def tried(make: Callable[[], Task]) -> Task | Absent:
    """Return the task, made and called once; or why that fails, for a row that says so."""
    try:
        task = make()
        with torch.no_grad():
            task()
    except Exception as error:  # a peer may raise anything
        return Absent.because(error)
    return task


def set_threads(threads: int) -> None:
    """Let torch, and programs started from here on, use this many threads."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)


def _order(names: Iterable[str], rounds: int, seed: int) -> Iterable[str]:
    drawn = random.Random(seed)
    order = list(names)
    for _ in range(rounds):
        drawn.shuffle(order)
        yield from order


def _seconds(task: Task, calls: int, clock: Clock) -> float:
    started = clock()
    for _ in range(calls):
        task()
    return (clock() - started) / calls
