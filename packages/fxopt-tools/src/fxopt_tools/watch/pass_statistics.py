"""`Statistics`: how much passes did."""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace

from torch.fx import GraphModule
from torch.nn.parameter import UninitializedParameter

from fxopt_core import Instrument, PassRun, Record
from fxopt_core.errors import VetoError
from fxopt_core.passes.undo import RecordedPass
from fxopt_core.text import notebook_text, text_table

_HEADINGS = ("pass", "runs", "rewritten", "refused", "nodes", "modules", "parameters", "bytes")


@dataclass(frozen=True)
class Size:
    """The size of a graph module.

    Attributes:
        nodes: nodes of its graph.
        modules: distinct modules in it, not counting itself.
        parameters: distinct parameters in it.
        parameter_bytes: bytes of their elements; uninitialised ones have none.
    """

    nodes: int = 0
    modules: int = 0
    parameters: int = 0
    parameter_bytes: int = 0

    def __add__(self, other: Size) -> Size:
        """Add number by number."""
        return Size(*map(operator.add, astuple(self), astuple(other)))

    @staticmethod
    def of(graph_module: GraphModule) -> Size:
        """Return the size of a graph module.

        >>> import torch
        >>> Size.of(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 3))))
        Size(nodes=3, modules=1, parameters=2, parameter_bytes=36)
        """
        modules, parameters = list(graph_module.modules()), list(graph_module.parameters())
        made = (each for each in parameters if not isinstance(each, UninitializedParameter))
        size = sum(each.numel() * each.element_size() for each in made)
        return Size(len(graph_module.graph.nodes), len(modules) - 1, len(parameters), size)


@dataclass(frozen=True)
class PassStatistics:
    """What all runs of a pass did in one direction.

    Attributes:
        name: the pass.
        description: the first line of its docstring.
        reverse: whether they undid it.
        runs: how many there were; numbers of sites and sizes are sums over the successful ones.
        vetoed: how many of them another instrument vetoed.
        failed: how many of them raised.
        rewritten: sites rewritten; in reverse, restored.
        refused: sites refused, by reason code.
        before: size of the graph module before.
        after: size after.
    """

    name: str
    description: str
    reverse: bool
    runs: int = 0
    vetoed: int = 0
    failed: int = 0
    rewritten: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    before: Size = field(default_factory=Size)
    after: Size = field(default_factory=Size)

    @property
    def label(self) -> str:
        """Name and direction."""
        return f"{'undoing ' if self.reverse else ''}{self.name}"


class Statistics(Instrument):
    """Counts, for each pass, sites rewritten, sites refused by reason, and the size of the module before and after.

    A pass counts as soon as it has run, even if a composition is rolled back later. To see vetoes, enter it before the
    instrument that vetoes: ``instrumented(Statistics(), Verify(...))``.

    >>> import torch
    >>> from fxopt_core import LintAndRecompile, instrumented
    >>> statistics = Statistics()
    >>> with instrumented(statistics):
    ...     _ = LintAndRecompile()(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 3))))
    >>> print(statistics)
    pass                runs  rewritten  refused  nodes  modules  parameters  bytes
    lint-and-recompile     1          0        0      3        1           2     36
    <BLANKLINE>
    lint-and-recompile: graph module -> the same one, its graph checked and its code generated anew.
    """

    may_veto = False

    def __init__(self) -> None:
        """Start counting."""
        self._rows: dict[tuple[str, bool], PassStatistics] = {}
        self._before: dict[int, Size] = {}  # by the run's id: a pass may call another one

    def rows(self) -> tuple[PassStatistics, ...]:
        """Return the numbers by pass and direction, in the order of their first runs."""
        return tuple(self._rows.values())

    def __str__(self) -> str:
        """Return a plain text table, then descriptions of the passes and reasons of refusals."""
        rows = self.rows()
        table = text_table([_HEADINGS, *map(_cells, rows)], right=range(1, len(_HEADINGS)))
        described = {row.name: f"{row.name}: {row.description}" for row in rows if row.description}
        lines = [*table, "", *described.values(), *(line for row in rows for line in _lines(row))]
        return "\n".join(lines).rstrip() if rows else "no pass has run"

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return notebook_text(self)

    def before_pass(self, run: PassRun, graph_module: GraphModule) -> None:
        """Count the run, and note the size before it."""
        self._before[id(run)] = Size.of(graph_module)
        row = self._row(run)
        self._set(replace(row, runs=row.runs + 1))

    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> None:
        """Count what the pass did, and the size after it."""
        row = self._row(run)
        refused = Counter(row.refused) + Counter(refusal.reason for refusal in record.refusals)
        before, after = row.before + self._before.pop(id(run)), row.after + Size.of(graph_module)
        rewritten = row.rewritten + len(record.rewrites)
        self._set(replace(row, rewritten=rewritten, refused=dict(refused), before=before, after=after))

    def after_pass_failed(self, run: PassRun, graph_module: GraphModule, error: BaseException) -> None:
        """Count a run that failed or was vetoed."""
        self._before.pop(id(run), None)
        row, vetoed = self._row(run), isinstance(error, VetoError)
        self._set(replace(row, vetoed=row.vetoed + vetoed, failed=row.failed + (not vetoed)))

    def _row(self, run: PassRun) -> PassStatistics:
        doc = "" if isinstance(run.transformation, RecordedPass) else type(run.transformation).__doc__ or ""
        new = PassStatistics(run.name, inspect.cleandoc(doc).partition("\n")[0], run.reverse)
        return self._rows.get((run.name, run.reverse), new)

    def _set(self, row: PassStatistics) -> None:
        self._rows[row.name, row.reverse] = row


def _cells(row: PassStatistics) -> Sequence[str]:
    pairs = zip(astuple(row.before), astuple(row.after), strict=True)
    sizes = (str(one) if one == two else f"{one} -> {two}" for one, two in pairs)
    return (row.label, str(row.runs), str(row.rewritten), str(sum(row.refused.values())), *sizes)


def _lines(row: PassStatistics) -> Iterator[str]:
    if row.refused:
        yield f"{row.label} refused: {', '.join(f'{reason} {count}' for reason, count in sorted(row.refused.items()))}"
    unmet = [f"{count} {what}" for count, what in ((row.vetoed, "vetoed"), (row.failed, "failed")) if count]
    if unmet:
        yield f"{row.label}: {' and '.join(unmet)} of {row.runs} runs"
