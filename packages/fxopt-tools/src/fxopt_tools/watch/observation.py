"""`observing`: the instruments of this package, entered in the right order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike

from torch import nn

from fxopt_core import InstrumentProtocol, instrumented
from fxopt_core.text import notebook_text
from fxopt_tools.inputs import OneInput
from fxopt_tools.verification.instrument import Verify
from fxopt_tools.watch.dumps import Dumps
from fxopt_tools.watch.pass_statistics import Statistics
from fxopt_tools.watch.timing import Timing


@dataclass(frozen=True)
class Observation:
    """What the instruments found out about passes.

    Attributes:
        timing: how long they took.
        statistics: how much they did.
        dumps: the files of each pass, or None.
        gate: whether they preserved what the module computes, or None.
    """

    timing: Timing
    statistics: Statistics
    dumps: Dumps | None = None
    gate: Verify | None = None

    @property
    def instruments(self) -> tuple[InstrumentProtocol, ...]:
        """The instruments: timing outermost, to show what others cost, the gate innermost: all see its vetoes."""
        return (self.timing, self.statistics, *(each for each in (self.dumps, self.gate) if each is not None))

    def __str__(self) -> str:
        """Return all tables."""
        checks = [] if self.gate is None else ["\n".join(map(str, self.gate.checks))]
        dumps = [] if self.dumps is None else [f"{len(self.dumps.files)} dumps in {self.dumps.directory}"]
        return "\n\n".join([str(self.timing), str(self.statistics), *checks, *dumps])

    def _repr_html_(self) -> str:
        """Return the tables for a notebook."""
        return notebook_text(self)


@contextmanager
def observing(
    inputs: OneInput | Sequence[OneInput] | None = None,
    *,
    original: nn.Module | None = None,
    dumps: str | PathLike[str] | None = None,
) -> Iterator[Observation]:
    """Time and count every pass that runs in the ``with`` block, and on request verify and dump it.

    Args:
        inputs: what to verify each pass on, as for `verify`; by default nothing is verified.
        original: a module to compare with, as for `Verify`.
        dumps: a new or empty directory for dumps of what each pass changed; by default nothing is dumped.

    Raises:
        PreconditionError: Inputs or directory are invalid.

    >>> import torch
    >>> from fxopt_core import LintAndRecompile
    >>> with observing(torch.ones(2)) as seen:
    ...     _ = LintAndRecompile()(torch.fx.symbolic_trace(torch.nn.ReLU()))
    >>> [row.runs for row in seen.statistics.rows()], [str(check) for check in seen.gate.checks]
    ([1], ['lint-and-recompile: passed'])
    """
    files = None if dumps is None else Dumps(dumps)
    gate = None if inputs is None else Verify(inputs, original=original)
    seen = Observation(Timing(), Statistics(), files, gate)
    with instrumented(*seen.instruments):
        yield seen
