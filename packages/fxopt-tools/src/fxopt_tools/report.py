"""What verifying found, as data and as a plain text table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fxopt_core import Tolerance, VerificationError
from fxopt_tools.measuring import Criterion, Measurement
from fxopt_tools.tables import notebook_text, text_table

_ERRORS = ("max abs error", "max rel error", "SQNR dB", "original's")
_HEADINGS = ("input", "output", "shape", "dtype", *_ERRORS, "tolerance", "")


@dataclass(frozen=True)
class OutputReport:
    """One tensor, or one other value, of one output.

    Attributes:
        path: where it is: ``output.logits[0]``; ``args[0] after the call`` for an input that the model wrote into.
        number: which of the inputs it belongs to, counted from 0.
        shape: shape of the original's tensor, or None where it is none.
        dtype: dtype of the original's tensor, or None where it is none.
        measurement: how far the tensors are apart; None where they cannot be compared.
        sqnr_db: signal-to-quantisation-noise ratio of the transformed, against `reference`, in dB; infinite where
            nothing differs. None for what is no floating-point or complex tensor with elements.
        original_sqnr_db: the same of the original; None where the reference is not in float64.
        reference: what the ratio is taken against: "float64", a run of the original in float64, or "original", its own
            output. None where there is no ratio.
        tolerance: what was allowed, before scaling; None where only equality will do.
        tolerance_source: where it comes from: "of float32", that of the dtype; "of bfloat16, in which the original
            computes", as that is coarser; "as stated" by the caller; or "rtol as stated, atol of float32". None where
            only equality will do.
        problem: what is wrong, or None.
        excused: what would be wrong, were it not that the original's own rounding explains it; or None.
    """

    path: str
    number: int = 0
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    measurement: Measurement | None = None
    sqnr_db: float | None = None
    original_sqnr_db: float | None = None
    reference: str | None = None
    tolerance: Tolerance | None = None
    tolerance_source: str | None = None
    problem: str | None = None
    excused: str | None = None

    @property
    def passed(self) -> bool:
        """Whether it is as it has to be."""
        return self.problem is None

    @property
    def max_absolute_error(self) -> float | None:
        """Largest absolute difference, or None where there is none to tell."""
        return None if self.measurement is None else self.measurement.max_absolute_error

    @property
    def max_relative_error(self) -> float | None:
        """Largest absolute difference divided by the original's value, over values other than 0."""
        return None if self.measurement is None else self.measurement.max_relative_error

    def __str__(self) -> str:
        """Return one sentence."""
        return f"`{self.path}` of input {self.number} {self.problem or self.excused or 'agrees'}"


@dataclass(frozen=True)
class VerificationReport:
    """What comparing two modules on some inputs gave; true if all outputs passed.

    Attributes:
        outputs: a report for each tensor and each other value of each output, input by input.
        notes: what else a reader has to know.
    """

    outputs: tuple[OutputReport, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether all outputs passed."""
        return all(output.passed for output in self.outputs)

    @property
    def failures(self) -> tuple[OutputReport, ...]:
        """The outputs that did not pass."""
        return tuple(output for output in self.outputs if not output.passed)

    @property
    def worst(self) -> OutputReport | None:
        """The output that is furthest from what is allowed, other structure being furthest, or None if all passed."""
        return max(self.failures, key=_severity, default=None)

    def __bool__(self) -> bool:
        """Return whether all outputs passed."""
        return self.passed

    def __str__(self) -> str:
        """Return a plain text table, with what is wrong and the notes below it.

        Values that are neither tensors nor numbers have no line of their own unless they are wrong.
        """
        problems = [f"failed: {output}" for output in self.failures]
        problems += [
            f"passed, as the original's own rounding is as large: {output}" for output in self.outputs if output.excused
        ]
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([self._summary(), *_table(self.outputs), *problems, *notes])

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return notebook_text(self)

    def raise_if_failed(self, *, pass_name: str | None = None, index: int | None = None) -> None:
        """Raise if an output did not pass.

        Args:
            pass_name: the pass that is to blame, where it is known.
            index: its position in the composition.

        Raises:
            VerificationError: It names the worst output, with numbers.
        """
        if self.worst is not None:
            raise VerificationError(_message(self, self.worst, pass_name), pass_name=pass_name, index=index)

    def _summary(self) -> str:
        tensors = sum(output.shape is not None for output in self.outputs)
        others = len(self.outputs) - tensors
        counts = [_count(tensors, "tensor")] * bool(tensors) + [_count(others, "other value")] * bool(others)
        verdict = ("passed", "none differs") if self.passed else ("FAILED", f"{len(self.failures)} of them wrong")
        return f"{verdict[0]}: {' and '.join(counts)} compared, {verdict[1]}"


def _message(report: VerificationReport, worst: OutputReport, pass_name: str | None) -> str:
    if pass_name is None:
        who = "the transformed module does not compute what the original does"
        remedy = "to find the pass that changed it, run the passes under fxopt_tools.Verify(inputs)"
    else:
        who = f"pass `{pass_name}` changed what the module computes"
        remedy = "leave the pass out or report it, or let Verify veto it by on_failure='veto'"
    others = f" ({len(report.failures)} of {len(report.outputs)} outputs are wrong)"
    if worst.measurement is not None and worst.tolerance is not None:
        remedy += "; if the difference is acceptable, state rtol and atol"
    notes = "".join(f"\nnote: {note}" for note in report.notes)
    return f"{who}: {worst}{others if len(report.failures) > 1 else ''}. What to do: {remedy}.{notes}"


def _severity(output: OutputReport) -> float:
    if output.measurement is None or output.measurement.worst is None:
        return math.inf
    worst = output.measurement.worst
    error = abs(worst.found - worst.expected)
    if not math.isfinite(error):
        return math.inf
    return error / worst.allowed if worst.allowed else math.inf


def _table(outputs: Sequence[OutputReport]) -> list[str]:
    shown = [output for output in outputs if output.measurement is not None or not output.passed]
    if not shown:
        return []
    first = 0 if any(output.number for output in outputs) else 1  # one input needs no number
    return text_table([row[first:] for row in (_HEADINGS, *map(_row, shown))])


def _row(output: OutputReport) -> tuple[str, ...]:
    return (
        str(output.number),
        output.path,
        "-" if output.shape is None else str(output.shape),
        "-" if output.dtype is None else str(output.dtype).removeprefix("torch."),
        _number(output.max_absolute_error, ".3g"),
        _number(output.max_relative_error, ".3g"),
        _number(output.sqnr_db, ".1f"),
        _number(output.original_sqnr_db, ".1f"),
        Criterion(output.tolerance, source=output.tolerance_source).text,
        "passed" if output.passed else "FAILED",
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
