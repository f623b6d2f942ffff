"""`Timing`: how long passes take."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.fx import GraphModule

from fxopt_core import Instrument, PassRun, PreconditionError, Record
from fxopt_core.errors import VetoError
from fxopt_core.text import notebook_text, text_table

Outcome = Literal["done", "vetoed", "failed", "running"]
Display = Literal["list", "tree"]
_HEADINGS = ("seconds", "self", "share", "around", "runs", "pass")


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

    def as_data(self) -> dict[str, Any]:
        """Return it as JSON data."""
        children = [child.as_data() for child in self.children]
        return {**vars(self), "self": self.own, "children": children}


@dataclass(frozen=True)
class TimedPass:
    """The total time of all runs of a pass in one direction.

    Attributes:
        name: the pass.
        reverse: whether they undid it.
        runs: how many there were.
        seconds: their total, with passes that they called.
        own: their total without those.
        around: the total of what was around them.
        share: the share of `own` in that of all passes, from 0 to 1.
    """

    name: str
    reverse: bool
    runs: int
    seconds: float
    own: float
    around: float
    share: float


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
    """Measures the wall time of every pass, as a list by pass or as a tree of compositions and passes within passes.

    Enter it first, ``with instrumented(Timing(), ...):``, so that the time of the other instruments shows as "around"
    and it learns of their vetoes. The snapshot of a run and its final lint and recompile do not belong to any pass and
    are not measured. It does not wait for work that a pass leaves to a GPU.

    >>> import torch
    >>> from fxopt_core import LintAndRecompile, compose, instrumented
    >>> timing = Timing()
    >>> with instrumented(timing):
    ...     _ = compose(LintAndRecompile(), LintAndRecompile())(torch.fx.symbolic_trace(torch.nn.ReLU()))
    >>> [(row.name, row.runs) for row in timing.rows()], [(run.name, len(run.children)) for run in timing.tree()]
    ([('lint-and-recompile', 2)], [('compose', 2)])
    """

    may_veto = False

    def __init__(self, *, display: Display = "list", clock: Callable[[], float] = time.perf_counter) -> None:
        """Start measuring.

        Args:
            display: what `str` shows, as for `table`.
            clock: returns seconds.
        """
        _check_display(display)
        self.display = display
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        """Forget what was measured."""
        self._roots: list[_Entry] = []
        self._entries: dict[int, _Entry] = {}  # by the run's id, which is unique while the entry holds the run

    def tree(self) -> tuple[TimedRun, ...]:
        """Return the outermost runs in order, each with the runs inside it."""
        return tuple(entry.timed() for entry in self._roots)

    def rows(self) -> tuple[TimedPass, ...]:
        """Return the times by pass and direction, the longest by themselves first."""
        grouped: dict[tuple[str, bool], list[TimedRun]] = {}
        for run in self._runs():
            grouped.setdefault((run.name, run.reverse), []).append(run)
        whole = sum(run.own for run in self._runs()) or 1.0
        rows: list[TimedPass] = []
        for (name, reverse), runs in grouped.items():
            seconds, own, around = (sum(getattr(run, part) for run in runs) for part in ("seconds", "own", "around"))
            rows.append(TimedPass(name, reverse, len(runs), seconds, own, around, own / whole))
        return tuple(sorted(rows, key=lambda row: -row.own))

    @property
    def seconds(self) -> float:
        """Wall time of all passes and of what was around them."""
        return sum(run.seconds + run.around for run in self.tree())

    def table(self, display: Display) -> str:
        """Return a plain text table, as the "list" by pass or as the "tree"; others are a `PreconditionError`."""
        _check_display(display)
        runs = len(self._runs())
        summary = f"{runs} run{'' if runs == 1 else 's'} of passes, {self.seconds:.4f} s"
        rows = self._list_cells() if display == "list" else self._tree_cells()
        table = text_table([_HEADINGS, *rows], right=range(len(_HEADINGS) - 1)) if runs else []
        return "\n".join([summary, *table])

    def __str__(self) -> str:
        """Return a plain text table."""
        return self.table(self.display)

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return notebook_text(self)

    def to_json(self) -> str:
        """Return everything as JSON: ``passes``, the rows of the list, and ``tree``; times in seconds."""
        passes = [{"self" if key == "own" else key: value for key, value in vars(row).items()} for row in self.rows()]
        data = {"seconds": self.seconds, "passes": passes, "tree": [run.as_data() for run in self.tree()]}
        return json.dumps(data, indent=2)

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

    def _runs(self) -> list[TimedRun]:
        return [run for root in self.tree() for _, run in root.walk() if run.outcome is not None]

    def _list_cells(self) -> Iterator[Sequence[str]]:
        for row in self.rows():
            name = f"{'undoing ' if row.reverse else ''}{row.name}"
            yield (f"{row.seconds:.4f}", f"{row.own:.4f}", f"{row.share:.1%}", f"{row.around:.4f}", str(row.runs), name)

    def _tree_cells(self) -> Iterator[Sequence[str]]:
        whole = sum(run.own for run in self._runs()) or 1.0
        for depth, run in (each for root in self.tree() for each in root.walk()):
            inside = [each for _, each in run.walk() if each.outcome is not None]
            share = sum(each.own for each in inside) / whole
            own, label = "-" if run.outcome is None else f"{run.own:.4f}", f"{'  ' * depth}{run.label}"
            yield (f"{run.seconds:.4f}", own, f"{share:.1%}", f"{run.around:.4f}", str(len(inside)), label)


def _check_display(display: str) -> None:
    if display not in ("list", "tree"):
        raise PreconditionError(f"display is {display!r}, expected 'list' or 'tree'")
