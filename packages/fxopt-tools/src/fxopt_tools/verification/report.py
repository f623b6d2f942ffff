"""The result of a verification, as data and as a plain text table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import torch

from fxopt_core import (
    VerificationError,
    text_table,
)
from fxopt_rewrite import Tolerance
from fxopt_tools.verification.closeness import Criterion, Measurement

_ERRORS = ("max abs error", "max rel error", "SQNR dB", "original's", "cosine")
_HEADINGS = ("input", "output", "shape", "dtype", *_ERRORS, "tolerance", "")
_NOTHING = (
    "Expected at least one finite floating-point number in what the modules return or write. What to do: verify with "
    "inputs that give some, return the numbers that integers are computed from (logits), or leave the verification out"
)
_COSINE = _HEADINGS.index("cosine")


@dataclass(frozen=True)
class OutputReport:
    """One tensor, or one other value, of one output.

    Attributes:
        path: where it is: ``output.logits[0]``; ``args[0] after the call`` for an input that the model wrote to.
        number: which of the inputs it belongs to, counted from 0.
        shape: shape of the original's tensor, or None if it is not a tensor.
        dtype: dtype of the original's tensor, or None if it is not a tensor.
        measurement: how far apart the tensors are; None if they cannot be compared.
        sqnr_db: signal-to-quantisation-noise ratio of the transformed output against `reference`, in dB; infinite if
            nothing differs. None unless it is a floating-point or complex tensor with elements.
        original_sqnr_db: the ratio of the original's output; None if the reference is not in float64.
        reference: the reference of the ratio: "float64", a run of the original in float64, or "original", its own
            output. None if there is no ratio.
        least_sqnr_db: the lowest ratio that was allowed; None if values were judged one by one. It is the stated or
            promised ratio, less the noise of the original itself.
        cosine: lowest cosine similarity with the original over the first dimension, if the ratio decides.
        tolerance: the tolerance, before scaling; None if values must be equal, or if the ratio decides.
        tolerance_source: where the tolerance comes from: "of float32", that of the dtype; "of bfloat16, in which the
            original computes", since it is coarser; "as stated" by the caller; or where the ratio comes from, "as
            stated" or "promised by fuse-linears".
        problem: what is wrong, or None.
        excused: a difference beyond the tolerance that the original's own rounding explains; or None.
        unseen: why no number in it was compared, such as "has no elements"; or None.
        floating: whether floating-point or complex numbers in it were compared.
    """

    path: str
    number: int = 0
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    measurement: Measurement | None = None
    sqnr_db: float | None = None
    original_sqnr_db: float | None = None
    reference: str | None = None
    least_sqnr_db: float | None = None
    cosine: float | None = None
    tolerance: Tolerance | None = None
    tolerance_source: str | None = None
    problem: str | None = None
    excused: str | None = None
    unseen: str | None = None
    floating: bool = False

    @property
    def passed(self) -> bool:
        """Whether it agrees with the original, as far as there is anything to compare."""
        return self.problem is None

    @property
    def max_absolute_error(self) -> float | None:
        """Largest absolute difference, or None if the values cannot be compared."""
        return None if self.measurement is None else self.measurement.max_absolute_error

    @property
    def max_relative_error(self) -> float | None:
        """Largest absolute difference divided by the original's value, over nonzero values."""
        return None if self.measurement is None else self.measurement.max_relative_error

    @property
    def allowed_text(self) -> str:
        """The tolerance or the ratio, with its source."""
        return Criterion(self.tolerance, source=self.tolerance_source, sqnr=self.least_sqnr_db).text

    def __str__(self) -> str:
        """Return one sentence."""
        return f"`{self.path}` of input {self.number} {self.problem or self.excused or self.unseen or 'agrees'}"


@dataclass(frozen=True)
class VerificationReport:
    """The result of comparing two modules on some inputs; true if all outputs passed and a number was among them.

    Attributes:
        outputs: a report for each tensor and each other value of each output, input by input.
        notes: anything else worth knowing.
    """

    outputs: tuple[OutputReport, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether all outputs passed, and there was something to see."""
        return self.saw_something and not self.failures

    @property
    def saw_something(self) -> bool:
        """Whether any floating-point number was compared; without one, no error of a pass would show."""
        return any(output.floating for output in self.outputs)

    @property
    def failures(self) -> tuple[OutputReport, ...]:
        """The outputs that did not pass."""
        return tuple(output for output in self.outputs if not output.passed)

    @property
    def worst(self) -> OutputReport | None:
        """The output furthest beyond its bound, where a different structure is worst; None if none failed."""
        return max(self.failures, key=_severity, default=None)

    def __bool__(self) -> bool:
        """Return whether it passed."""
        return self.passed

    def __str__(self) -> str:
        """Return a plain text table, followed by problems and notes.

        Values that are neither tensors nor numbers are listed only if they are wrong.
        """
        excused = "passed, as the original's own rounding is as large"
        lines = [] if self.problem is None or self.failures else [f"failed: {self.problem}"]
        lines += [f"failed: {output}" for output in self.failures]
        lines += [f"not compared: {output}" for output in self.outputs if output.unseen and output.passed]
        lines += [f"{excused}: {output}" for output in self.outputs if output.excused]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([self._summary(), *_table(self.outputs), *lines])

    def raise_if_failed(self, *, pass_name: str | None = None, index: int | None = None) -> None:
        """Raise if the verification did not pass.

        Args:
            pass_name: the pass to blame, if known.
            index: its position in the composition.

        Raises:
            VerificationError: An output did not pass, and the message names the worst one, with numbers; or there was
                nothing to see.
        """
        if not self.passed:
            raise VerificationError(_message(self, pass_name), pass_name=pass_name, index=index)

    @property
    def problem(self) -> str | None:
        """What is wrong, in a sentence: with the worst output, or that there was nothing to see; None if passed."""
        if self.worst is not None:
            return str(self.worst)
        if self.saw_something:
            return None
        unseen = "; ".join(str(output) for output in self.outputs if output.unseen)
        others = "none of the values returned is a floating-point number" if self.outputs else "nothing was returned"
        return f"the verification saw nothing: {unseen or others}"

    def _summary(self) -> str:
        tensors = sum(output.shape is not None for output in self.outputs)
        others = len(self.outputs) - tensors
        counts = [counted(tensors, "tensor")] * bool(tensors) + [counted(others, "other value")] * bool(others)
        wrong = f"{len(self.failures)} of them wrong" if self.failures else "none differs"
        return f"{'passed' if self.passed else 'FAILED'}: {' and '.join(counts) or 'nothing'} compared, {wrong}"


def _message(report: VerificationReport, pass_name: str | None) -> str:
    worst = report.worst
    if worst is None:
        return f"{report.problem}. {_NOTHING}"
    if pass_name is None:
        who = "the transformed module does not compute what the original does"
        remedy = "to find the pass that changed it, run the passes under fxopt_tools.Verify(inputs)"
    else:
        who = f"pass `{pass_name}` changed what the module computes"
        remedy = "leave the pass out or report it, or let Verify veto it by on_failure='veto'"
    others = f" ({len(report.failures)} of {len(report.outputs)} outputs are wrong)"
    if worst.least_sqnr_db is not None:
        remedy += "; if the loss is acceptable, state sqnr"
    elif worst.measurement is not None and worst.tolerance is not None:
        remedy += "; if the difference is acceptable, state rtol and atol"
    notes = "".join(f"\nnote: {note}" for note in report.notes)
    return f"{who}: {worst}{others if len(report.failures) > 1 else ''}. What to do: {remedy}.{notes}"


def _severity(output: OutputReport) -> float:
    if output.least_sqnr_db is not None and output.sqnr_db is not None:
        # As a ratio of amplitudes, like that of an error to its tolerance below.
        return math.inf if output.sqnr_db == -math.inf else 10 ** ((output.least_sqnr_db - output.sqnr_db) / 20)
    worst = None if output.measurement is None else output.measurement.worst
    if worst is None or not worst.allowed:
        return math.inf
    error = abs(worst.found - worst.expected)
    return error / worst.allowed if math.isfinite(error) else math.inf


def _table(outputs: Sequence[OutputReport]) -> list[str]:
    shown = [output for output in outputs if output.measurement is not None or not output.passed]
    needed = [True] * len(_HEADINGS)
    needed[0] = any(output.number for output in outputs)  # one input needs no number
    needed[_COSINE] = any(output.cosine is not None for output in outputs)
    return text_table([tuple(compress(row, needed)) for row in (_HEADINGS, *map(_row, shown))]) if shown else []


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
        _number(output.cosine, ".5f"),
        output.allowed_text,
        "FAILED" if not output.passed else "not compared" if output.unseen else "passed",
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 tensor``, ``2 tensors``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
