"""`Statistics`: what passes did, in numbers."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy

from fxopt_core import Instrument, PassRun, Record
from fxopt_core.errors import VetoError
from fxopt_core.recorded_pass import RecordedPass
from fxopt_tools.tables import notebook_text, text_table

_HEADINGS = ("pass", "runs", "rewritten", "refused", "nodes", "modules", "parameters", "bytes")


@dataclass(frozen=True)
class Size:
    """The size of a graph module.

    Attributes:
        nodes: nodes of its graph.
        modules: modules in it, itself not counted, each once.
        parameters: parameters in it, tied ones once; those that are not initialised yet have no bytes.
        parameter_bytes: bytes of their elements.
    """

    nodes: int = 0
    modules: int = 0
    parameters: int = 0
    parameter_bytes: int = 0

    def __add__(self, other: Size) -> Size:
        """Add number by number."""
        return Size(*(one + two for one, two in zip(_numbers(self), _numbers(other), strict=True)))

    @staticmethod
    def of(graph_module: GraphModule) -> Size:
        """Return the size of a graph module.

        >>> import torch
        >>> Size.of(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 3))))
        Size(nodes=3, modules=1, parameters=2, parameter_bytes=36)
        """
        parameters = list(graph_module.parameters())
        modules = sum(1 for _ in graph_module.modules()) - 1
        return Size(len(graph_module.graph.nodes), modules, len(parameters), sum(map(_bytes, parameters)))


@dataclass(frozen=True)
class PassStatistics:
    """What all runs of a pass did together, in one direction.

    Attributes:
        name: name of the pass.
        description: the first line of its docstring.
        reverse: whether they undid it.
        runs: how many runs there were; the other numbers are sums over those that stood.
        vetoed: how many of these another instrument vetoed.
        failed: how many of these raised.
        rewritten: sites rewritten; for reversals, taken back.
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


@dataclass
class _Counts:
    """The numbers of a pass while they are counted."""

    description: str
    runs: int = 0
    vetoed: int = 0
    failed: int = 0
    rewritten: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    before: Size = field(default_factory=Size)
    after: Size = field(default_factory=Size)

    def add(self, record: Record, before: Size, after: Size) -> None:
        self.rewritten += len(record.rewrites)
        for refusal in record.refusals:
            self.refused[refusal.reason] = self.refused.get(refusal.reason, 0) + 1
        self.before += before
        self.after += after


class Statistics(Instrument):
    """Counts, for each pass, sites rewritten, sites refused by reason, and the size of the module before and after.

    Counted is what a pass did as it ran. Of a veto it learns if the instrument that vetoes was entered after it: write
    ``instrumented(Statistics(), Verify(...))``. A run that is rolled back as a whole later on stays counted.

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
        """Start with nothing counted."""
        self.clear()

    def clear(self) -> None:
        """Forget what was counted."""
        self._counts: dict[tuple[str, bool], _Counts] = {}
        self._before: dict[int, Size] = {}  # by the run's id: a pass may call another one

    def rows(self) -> tuple[PassStatistics, ...]:
        """Return the numbers by pass and direction, in the order in which they ran first."""
        return tuple(
            PassStatistics(name=name, reverse=reverse, **{**vars(counts), "refused": dict(counts.refused)})
            for (name, reverse), counts in self._counts.items()
        )

    def __str__(self) -> str:
        """Return a plain text table, and below it the reasons of refusals and what the passes are."""
        rows = self.rows()
        if not rows:
            return "no pass has run"
        table = text_table([_HEADINGS, *map(_cells, rows)], right=range(1, len(_HEADINGS)))
        described = {row.name: f"{row.name}: {row.description}" for row in rows if row.description}
        return "\n".join([*table, "", *described.values(), *(line for row in rows for line in _lines(row))]).rstrip()

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return notebook_text(self)

    def to_json(self) -> str:
        """Return the rows as JSON."""
        rows: list[dict[str, Any]] = [asdict(row) for row in self.rows()]
        return json.dumps({"passes": rows}, indent=2)

    def before_pass(self, run: PassRun, graph_module: GraphModule) -> None:
        """Count what is there."""
        self._before[id(run)] = Size.of(graph_module)
        self._of(run).runs += 1

    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> None:
        """Count what the pass did, and what is there now."""
        before = self._before.pop(id(run))
        self._of(run).add(record, before, Size.of(graph_module))

    def after_pass_failed(self, run: PassRun, graph_module: GraphModule, error: BaseException) -> None:
        """Count a run that did not stand."""
        self._before.pop(id(run), None)
        counts = self._of(run)
        if isinstance(error, VetoError):
            counts.vetoed += 1
        else:
            counts.failed += 1

    def _of(self, run: PassRun) -> _Counts:
        return self._counts.setdefault((run.name, run.reverse), _Counts(_description(run)))


def _numbers(size: Size) -> tuple[int, int, int, int]:
    return size.nodes, size.modules, size.parameters, size.parameter_bytes


def _bytes(tensor: Tensor) -> int:
    return 0 if is_lazy(tensor) else tensor.numel() * tensor.element_size()


def _description(run: PassRun) -> str:
    if isinstance(run.transformation, RecordedPass):
        return ""
    return inspect.cleandoc(type(run.transformation).__doc__ or "").partition("\n")[0]


def _cells(row: PassStatistics) -> Sequence[str]:
    sizes = (
        str(one) if one == two else f"{one} -> {two}"
        for one, two in zip(_numbers(row.before), _numbers(row.after), strict=True)
    )
    return (row.label, str(row.runs), str(row.rewritten), str(sum(row.refused.values())), *sizes)


def _lines(row: PassStatistics) -> Iterator[str]:
    if row.refused:
        yield f"{row.label} refused: {', '.join(f'{reason} {count}' for reason, count in sorted(row.refused.items()))}"
    unmet = [f"{count} {what}" for count, what in ((row.vetoed, "vetoed"), (row.failed, "failed")) if count]
    if unmet:
        yield f"{row.label}: {' and '.join(unmet)} of {row.runs} runs"
