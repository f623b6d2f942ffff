"""`Timing`: where the time of passes goes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.fx import GraphModule

from fxopt_core import Instrument, PassRun, PreconditionError, Record
from fxopt_core.errors import VetoError
from fxopt_tools.tables import notebook_text, text_table

Outcome = Literal["done", "vetoed", "failed", "running"]
Display = Literal["list", "tree"]
_HEADINGS = ("seconds", "self", "share", "around", "runs", "pass")


@dataclass(frozen=True)
class TimedRun:
    """The time of one run of a pass, or of the composition, or the undo, that runs are part of.

    Attributes:
        name: name of the pass; "compose" and "undo" are no passes, and their times are sums.
        index: position in the composition, or None outside one.
        reverse: whether it was being undone.
        outcome: "done", "vetoed" by another instrument, "failed", or "running" still; None for a sum.
        seconds: wall time of `transform`, or of the reversal, passes that it called included. Where it failed or was
            vetoed, the time until this instrument was told, what is around it included.
        around: wall time that core and the instruments entered after this one took for it: records, copies to roll
            back to, checks, and running the module for `Verify`.
        children: the runs inside of it, in order.
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
        """Seconds of the pass without the runs inside of it, and what was around them; 0 for a sum."""
        if self.outcome is None:
            return 0.0
        return max(0.0, self.seconds - sum(child.seconds + child.around for child in self.children))

    @property
    def label(self) -> str:
        """What a reader has to know of it, in a few words."""
        undone = self.reverse and self.name != "undo"
        note = "" if self.outcome in (None, "done") else f" ({self.outcome})"
        return f"{'undoing ' if undone else ''}{self.name}{note}"

    def walk(self, depth: int = 0) -> Iterator[tuple[int, TimedRun]]:
        """Yield this and all runs inside of it, outermost first, with their depths."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)

    def as_data(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        children = [child.as_data() for child in self.children]
        plain = {name: getattr(self, name) for name in ("name", "index", "reverse", "outcome", "seconds", "around")}
        return {**plain, "self": self.own, "children": children}


@dataclass(frozen=True)
class TimedPass:
    """The times of all runs of a pass together, in one direction.

    Attributes:
        name: name of the pass.
        reverse: whether they undid it.
        runs: how many runs there were.
        seconds: the sum of theirs, passes that they called included.
        own: the sum of theirs without these.
        around: the sum of what was around them.
        share: the part of `own` in that of all passes, from 0 to 1.
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
    """A run while it is measured."""

    run: PassRun
    is_sum: bool = True
    started: float = 0.0
    outcome: Outcome = "running"
    seconds: float = 0.0
    around: float = 0.0
    children: list[_Entry] = field(default_factory=list)

    def timed(self) -> TimedRun:
        children = tuple(child.timed() for child in self.children)
        run, outcome = self.run, None if self.is_sum else self.outcome
        seconds = sum(child.seconds for child in children) if self.is_sum else self.seconds
        around = sum(child.around for child in children) if self.is_sum else self.around
        return TimedRun(run.name, run.index, run.reverse, outcome, seconds, around, children)


class Timing(Instrument):
    """Measures the wall time of every pass: as a list by pass, or as the tree of compositions and of passes in passes.

    Enter it first, ``with instrumented(Timing(), ...):``, so that the time of the other instruments shows as "around",
    and so that it learns of their vetoes. Neither lint and recompile at the end of a run nor its snapshot belong to any
    pass, and are not measured. Work that a pass leaves to a GPU is not waited for.

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
        """Start with nothing measured.

        Args:
            display: what `str` shows: the "list" by pass, or the "tree".
            clock: returns seconds.

        Raises:
            PreconditionError: There is no such display.
        """
        _check_display(display)
        self.display = display
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        """Forget what was measured."""
        self._roots: list[_Entry] = []
        self._entries: dict[int, _Entry] = {}  # by the run's id, which stays taken as long as the entry holds the run

    def tree(self) -> tuple[TimedRun, ...]:
        """Return the outermost runs in order, each with the runs inside of it."""
        return tuple(entry.timed() for entry in self._roots)

    def rows(self) -> tuple[TimedPass, ...]:
        """Return the times by pass and direction, those that took longest by themselves first."""
        grouped: dict[tuple[str, bool], list[TimedRun]] = {}
        for run in self._runs():
            grouped.setdefault((run.name, run.reverse), []).append(run)
        owns = {key: sum(run.own for run in runs) for key, runs in grouped.items()}
        whole = sum(owns.values())
        rows = [
            TimedPass(
                *key,
                runs=len(runs),
                seconds=sum(run.seconds for run in runs),
                own=owns[key],
                around=sum(run.around for run in runs),
                share=owns[key] / whole if whole else 0.0,
            )
            for key, runs in grouped.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.own))

    @property
    def seconds(self) -> float:
        """Wall time of all passes, and of what was around them."""
        return sum(run.seconds + run.around for run in self.tree())

    def table(self, display: Display) -> str:
        """Return a plain text table, as the "list" by pass or as the "tree".

        Raises:
            PreconditionError: There is no such display.
        """
        _check_display(display)
        runs = len(self._runs())
        summary = f"{runs} run{'' if runs == 1 else 's'} of passes, {self.seconds:.4f} s"
        if not runs:
            return summary
        rows = self._list_cells() if display == "list" else self._tree_cells()
        return "\n".join([summary, *text_table([_HEADINGS, *rows], right=range(len(_HEADINGS) - 1))])

    def __str__(self) -> str:
        """Return a plain text table."""
        return self.table(self.display)

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return notebook_text(self)

    def to_json(self) -> str:
        """Return all that was measured as JSON: ``passes``, the rows of the list, and ``tree``; times in seconds."""
        names = ("name", "reverse", "runs", "seconds", "around", "share")
        passes = [{**{name: getattr(row, name) for name in names}, "self": row.own} for row in self.rows()]
        data = {"seconds": self.seconds, "passes": passes, "tree": [run.as_data() for run in self.tree()]}
        return json.dumps(data, indent=2)

    def before_pass(self, run: PassRun, graph_module: GraphModule) -> None:
        """Start the clock."""
        entry = self._entry(run)
        entry.is_sum = False
        entry.started = self._clock()

    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> None:
        """Stop the clock."""
        entry = self._entry(run)
        wall = self._clock() - entry.started
        entry.outcome, entry.seconds = "done", record.seconds
        entry.around = max(0.0, wall - record.seconds)

    def after_pass_failed(self, run: PassRun, graph_module: GraphModule, error: BaseException) -> None:
        """Stop the clock."""
        entry = self._entry(run)
        entry.outcome = "vetoed" if isinstance(error, VetoError) else "failed"
        entry.seconds = self._clock() - entry.started

    def _entry(self, run: PassRun) -> _Entry:
        """Return the entry of a run; where it is new, put it into that of the run that it is part of."""
        entry = self._entries.get(id(run))
        if entry is None:
            entry = self._entries[id(run)] = _Entry(run)
            siblings = self._roots if run.parent is None else self._entry(run.parent).children
            siblings.append(entry)
        return entry

    def _runs(self) -> list[TimedRun]:
        found = (run for root in self.tree() for _, run in root.walk())
        return [run for run in found if run.outcome is not None]

    def _list_cells(self) -> Iterator[Sequence[str]]:
        for row in self.rows():
            name = f"{'undoing ' if row.reverse else ''}{row.name}"
            yield (_s(row.seconds), _s(row.own), f"{row.share:.1%}", _s(row.around), str(row.runs), name)

    def _tree_cells(self) -> Iterator[Sequence[str]]:
        whole = sum(run.own for run in self._runs())
        for root in self.tree():
            for depth, run in root.walk():
                inside = [each for _, each in run.walk() if each.outcome is not None]
                share = sum(each.own for each in inside) / whole if whole else 0.0
                own, label = "-" if run.outcome is None else _s(run.own), f"{'  ' * depth}{run.label}"
                yield (_s(run.seconds), own, f"{share:.1%}", _s(run.around), str(len(inside)), label)


def _s(seconds: float) -> str:
    return f"{seconds:.4f}"


def _check_display(display: str) -> None:
    if display not in ("list", "tree"):
        raise PreconditionError(f"display is {display!r}, expected 'list' or 'tree'")
