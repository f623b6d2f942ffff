"""`Timing`: how long passes take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from torch.fx import GraphModule

from fxopt_core import Instrument, PassRun, Record
from fxopt_core.errors import VetoError
from fxopt_core.text import notebook_text, text_table
from fxopt_tools.verification.report import counted

Outcome = Literal["done", "vetoed", "failed", "running"]
_HEADINGS = ("seconds", "self", "share", "around", "pass")


@dataclass(frozen=True)
class TimedRun:
    """The time of one run of a pass, or of the composition or undo that runs are part of.

    Attributes:
        name: the pass; "compose" and "undo" are not passes, and their times are sums.
        index: position in the composition, or None outside one.
        reverse: whether it was being undone.
        outcome: "done", "vetoed" by another instrument, "failed", or still "running"; None for a sum.
        seconds: wall time of `transform`, or of the reversal, with passes that it called. If it failed or was vetoed,
            the time until this instrument was notified.
        around: wall time that core and the instruments entered after this one spent on it: records, copies to roll
            back to, checks, and running the module for `Verify`.
        children: the runs inside it, in order.
    """

    name: str
    index: int | None
    reverse: bool
    outcome: Outcome | None
    seconds: float
    around: float
    children: tuple[TimedRun, ...] = ()

    @property
    def own(self) -> float:
        """Seconds of the pass without the runs inside it and what was around them; 0 for a sum."""
        if self.outcome is None:
            return 0.0
        return max(0.0, self.seconds - sum(child.seconds + child.around for child in self.children))

    @property
    def label(self) -> str:
        """Name, direction and outcome, in a few words."""
        undone = self.reverse and self.name != "undo"
        note = "" if self.outcome in (None, "done") else f" ({self.outcome})"
        return f"{'undoing ' if undone else ''}{self.name}{note}"

    def walk(self, depth: int = 0) -> Iterator[tuple[int, TimedRun]]:
        """Yield this and all runs inside it, outermost first, with their depths."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


@dataclass
class _Entry:
    """A run that is being measured."""

    run: PassRun
    outcome: Outcome | None = None  # that of a sum, unless the run turns out to be that of a pass
    started: float = 0.0
    seconds: float = 0.0
    around: float = 0.0
    children: list[_Entry] = field(default_factory=list)

    def timed(self) -> TimedRun:
        children = tuple(child.timed() for child in self.children)
        measured = [self] if self.outcome is not None else children
        seconds, around = sum(each.seconds for each in measured), sum(each.around for each in measured)
        return TimedRun(self.run.name, self.run.index, self.run.reverse, self.outcome, seconds, around, children)


class Timing(Instrument):
    """Measures the wall time of every pass, as a tree of compositions and passes within passes.

    Enter it first, ``with instrumented(Timing(), ...):``, so that the time of the other instruments shows as "around"
    and it learns of their vetoes. The snapshot of a run and its final lint and recompile do not belong to any pass and
    are not measured. It does not wait for work that a pass leaves to a GPU.

    >>> import torch
    >>> from fxopt_core import LintAndRecompile, compose, instrumented
    >>> timing = Timing()
    >>> with instrumented(timing):
    ...     _ = compose(LintAndRecompile(), LintAndRecompile())(torch.fx.symbolic_trace(torch.nn.ReLU()))
    >>> [(run.name, len(run.children)) for run in timing.tree()]
    [('compose', 2)]
    """

    may_veto = False

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start measuring by a clock, which returns seconds."""
        self._clock = clock
        self._roots: list[_Entry] = []
        self._entries: dict[int, _Entry] = {}  # by the run's id, which is unique while the entry holds the run

    def tree(self) -> tuple[TimedRun, ...]:
        """Return the outermost runs in order, each with the runs inside it."""
        return tuple(entry.timed() for entry in self._roots)

    @property
    def seconds(self) -> float:
        """Wall time of all passes and of what was around them."""
        return sum(run.seconds + run.around for run in self.tree())

    def __str__(self) -> str:
        """Return a plain text table; passes inside of others are indented."""
        runs = [each for root in self.tree() for each in root.walk()]
        whole = sum(run.own for _, run in runs) or 1.0
        rows = [_HEADINGS]
        for depth, run in runs:
            share = sum(each.own for _, each in run.walk()) / whole
            own = "-" if run.outcome is None else f"{run.own:.4f}"
            rows.append((f"{run.seconds:.4f}", own, f"{share:.1%}", f"{run.around:.4f}", f"{'  ' * depth}{run.label}"))
        count = counted(sum(run.outcome is not None for _, run in runs), "run")
        table = text_table(rows, right=range(4)) if runs else []
        return "\n".join([f"{count} of passes, {self.seconds:.4f} s", *table])

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return notebook_text(self)

    def before_pass(self, run: PassRun, graph_module: GraphModule) -> None:
        """Start the clock."""
        entry = self._entry(run)
        entry.outcome, entry.started = "running", self._clock()

    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> None:
        """Stop the clock."""
        entry = self._entry(run)
        wall = self._clock() - entry.started
        entry.outcome, entry.seconds, entry.around = "done", record.seconds, max(0.0, wall - record.seconds)

    def after_pass_failed(self, run: PassRun, graph_module: GraphModule, error: BaseException) -> None:
        """Stop the clock."""
        entry = self._entry(run)
        entry.outcome = "vetoed" if isinstance(error, VetoError) else "failed"
        entry.seconds = self._clock() - entry.started

    def _entry(self, run: PassRun) -> _Entry:
        """Return the entry of a run; add a new one to the entry of the run that it is part of."""
        entry = self._entries.get(id(run))
        if entry is None:
            entry = self._entries[id(run)] = _Entry(run)
            (self._roots if run.parent is None else self._entry(run.parent).children).append(entry)
        return entry
