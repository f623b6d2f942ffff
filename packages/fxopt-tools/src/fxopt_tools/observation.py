"""`observing`: the instruments of this package together, in the right order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike

from torch import nn

from fxopt_core import InstrumentProtocol, instrumented
from fxopt_tools.dumps import Dumps
from fxopt_tools.inputs import OneInput
from fxopt_tools.instrument import Verify
from fxopt_tools.statistics import Statistics
from fxopt_tools.tables import notebook_text
from fxopt_tools.timing import Timing


@dataclass(frozen=True)
class Observation:
    """What was seen of passes.

    Attributes:
        timing: their times.
        statistics: what they did, in numbers.
        dumps: the files of each of them, or None where none were asked for.
        gate: whether they kept what the module computes, or None where there were no inputs to find out.
    """

    timing: Timing
    statistics: Statistics
    dumps: Dumps | None = None
    gate: Verify | None = None

    @property
    def instruments(self) -> tuple[InstrumentProtocol, ...]:
        """The instruments, outermost first.

        The gate is innermost, so that all others learn of a veto; timing is outermost, and tells what the others cost.
        """
        optional = (self.dumps, self.gate)
        return (self.timing, self.statistics, *(each for each in optional if each is not None))

    def __str__(self) -> str:
        """Return the tables one below the other."""
        parts = [self.timing.table("tree"), str(self.statistics)]
        if self.gate is not None:
            parts.append("\n".join(map(str, self.gate.checks)))
        if self.dumps is not None:
            parts.append(f"{len(self.dumps.files)} dumps in {self.dumps.directory}")
        return "\n\n".join(parts)

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
        inputs: what to verify each pass on, as for `verify`; without, nothing is verified.
        original: a module to compare with, as for `Verify`.
        dumps: a new or empty directory for dumps of what each pass changed; without, nothing is dumped.

    Raises:
        PreconditionError: Inputs or directory make no sense.

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
