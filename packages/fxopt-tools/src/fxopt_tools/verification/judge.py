"""Compares the effects of two runs, value by value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from fxopt_rewrite import Tolerance, tolerance
from fxopt_tools.value_tree import Container, equal, has_value
from fxopt_tools.verification.bounds import UNSTATED, Bounds
from fxopt_tools.verification.closeness import (
    Criterion,
    Measurement,
    cosine,
    is_rounding,
    least_sqnr_db,
    measure,
    sqnr_db,
    wide,
)
from fxopt_tools.verification.isolated_run import Outcome
from fxopt_tools.verification.report import OutputReport, counted

_AFTER = " after the call"
# With a lower ratio, the run in float64 took another way through the model and is no reference.
_RELATED_DB = 10.0
# How many times finer than the original's a reference's unit of rounding has to be.
_FINER = 64


@dataclass(frozen=True)
class Judge:
    """Compares outcomes for one input.

    Attributes:
        number: which of the inputs it is.
        computed_in: the dtypes that the original computes in. An output is judged by the coarsest of these and its own
            dtype: a bfloat16 model is not more exact because it returns float32.
        bounds: the bounds that replace the tolerance of the dtype.
    """

    number: int = 0
    computed_in: frozenset[torch.dtype] = frozenset()
    bounds: Bounds = UNSTATED

    def compare(self, expected: Outcome, found: Outcome, reference: Outcome | None = None) -> Iterator[OutputReport]:
        """Compare all values of the outputs, and the arguments and buffers that either run wrote to.

        The reference is the outcome of the original in float64, if there is one. With a bound on the signal-to-noise
        ratio, values for padding, which are never read, are not compared.
        """
        tokens = None if self.bounds.sqnr is None else tokens_of(expected)
        trees = (expected.output, found.output, {} if reference is None else reference.output)
        for report in self.parts(*(trees if tokens is None else (_of_tokens(tree, tokens) for tree in trees))):
            was = expected.strides.get(report.path)
            now = found.strides.get(report.path, was)
            if report.passed and was != now:
                problem = f"has strides {now}, expected {was} as in the original: a view of it may differ, or raise"
                report = replace(report, problem=problem)
            yield report
        # Arguments that were not touched and are no tensors are ignored: each run has a copy, which may not be equal.
        touched = expected.touched | found.touched
        both = (*expected.arguments.items(), *found.arguments.items())
        others = {path for path, value in both if not isinstance(value, Tensor)}
        exact = {} if reference is None else reference.arguments
        for report in self.parts(expected.arguments, found.arguments, exact):
            if report.path in touched or not (report.passed or report.path in others):
                yield replace(report, path=f"{report.path}{_AFTER}")
        buffers = {} if reference is None else reference.buffers
        renamed = found.buffers_written - expected.buffers.keys()
        for name in sorted(expected.buffers_written | (found.buffers_written - renamed)):
            path = f"{name}{_AFTER}"
            if name in found.buffers:
                yield self._tensors(path, expected.buffers[name], found.buffers[name], buffers.get(name))
            elif renamed:  # a pass may have merged or renamed it
                names = " and ".join(f"`{other}`" for other in sorted(renamed))
                unseen = f"is written by the original, and not found by its name in the other, which writes {names}"
                yield OutputReport(path, self.number, unseen=unseen)
            else:
                yield self._problem(path, "is written by the original, and the other has no such buffer")

    def gradients(
        self, expected: Mapping[str, Tensor], found: Mapping[str, Tensor], exact: Mapping[str, Tensor]
    ) -> list[OutputReport]:
        """Compare the gradients that both have; ``exact`` are those in float64, if there are any."""
        return [self._tensors(path, a, found[path], exact.get(path)) for path, a in expected.items() if path in found]

    def criterion(self, dtype: torch.dtype) -> Criterion:
        """Return the criterion for an output of a dtype."""
        if not (dtype.is_floating_point or dtype.is_complex):
            return Criterion(None)
        bounds = self.bounds
        if bounds.sqnr is not None:
            return Criterion(None, source=bounds.source, sqnr=bounds.sqnr)
        coarsest = self._coarsest(dtype)
        usual = tolerance(coarsest)
        rtol = usual.rtol if bounds.rtol is None else bounds.rtol
        atol = usual.atol if bounds.atol is None else bounds.atol
        eps = None if bounds.stated else torch.finfo(coarsest).eps
        computed = "" if coarsest == dtype.to_real() else ", in which the original computes"
        source = f"of {str(coarsest).removeprefix('torch.')}{computed}"
        if bounds.stated:
            source = "as stated" if None not in (bounds.rtol, bounds.atol) else f"as stated, the other {source}"
        return Criterion(Tolerance(rtol, atol), eps, source)

    def _coarsest(self, dtype: torch.dtype) -> torch.dtype:
        return max({dtype.to_real(), *self.computed_in}, key=lambda candidate: torch.finfo(candidate).eps)

    def _truth(self, a: Tensor, exact: object) -> Tensor | None:
        """Return the original's output in float64, or None if it is another quantity or hardly more exact."""
        if not isinstance(exact, Tensor) or exact.shape != a.shape or not a.numel():
            return None
        if not all(tensor.is_floating_point() or tensor.is_complex() for tensor in (a, exact)):
            return None
        finer = _FINER * torch.finfo(exact.dtype).eps <= torch.finfo(self._coarsest(a.dtype)).eps
        usable = finer or exact.dtype in (torch.float64, torch.complex128)  # float32 will do for half precision
        return exact if usable and sqnr_db(exact, a) >= _RELATED_DB else None

    def parts(
        self, a: Mapping[str, object], b: Mapping[str, object], exact: Mapping[str, object] = MappingProxyType({})
    ) -> Iterator[OutputReport]:
        """Compare parts by their paths; of containers that differ, the contents are not compared."""
        wrong: list[str] = []
        for path in {**a, **b}:
            if any(path.startswith((f"{each}[", f"{each}.")) for each in wrong):
                continue
            if path in a and path in b:
                report = self._values(path, a[path], b[path], exact.get(path))
                both = [each for each in (a[path], b[path]) if isinstance(each, Container)]
                if both and report.passed and any(each.size for each in both):
                    continue  # the contents say it
            elif path in a:
                report = self._problem(path, f"is missing, expected {describe(a[path])} as in the original")
            else:
                report = self._problem(path, f"is {describe(b[path])}, which the original does not return")
            if Container in (type(a.get(path)), type(b.get(path))):
                wrong.append(path)
            yield report

    def _values(self, path: str, a: object, b: object, exact: object) -> OutputReport:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return self._tensors(path, a, b, exact)
        # Not `isinstance`: 1, 1.0 and True are different results.
        if type(a) is type(b):
            if isinstance(a, (float, complex)) and isinstance(b, (float, complex)):
                return self._numbers(path, a, b)
            if equal(a, b):
                return OutputReport(path, self.number)
            if not has_value(a):
                return self._problem(
                    path,
                    f"is of type {type(b).__name__} in both, which has no way to tell whether two of them are equal: "
                    "return what it holds, in a list or a mapping, or compare it yourself",
                )
        return self._problem(path, f"is {describe(b)}, expected {describe(a)} as in the original")

    def _numbers(self, path: str, a: float | complex, b: float | complex) -> OutputReport:
        """Compare Python numbers as float32 results: they usually are the ``item()`` of such a tensor."""
        dtype = torch.complex128 if isinstance(a, complex) else torch.float64
        one, other = (torch.tensor(each, dtype=dtype) for each in (a, b))
        return replace(self._tensors(path, one, other, None, torch.float32), shape=None, dtype=None)

    def _tensors(
        self, path: str, a: Tensor, b: Tensor, exact: object, judged_as: torch.dtype | None = None
    ) -> OutputReport:
        shape = tuple(a.shape)
        different = _other_kind(a, b)
        if different is not None:
            return OutputReport(path, self.number, shape, a.dtype, problem=different)
        if a.is_meta:
            unseen = "is on the meta device and holds no numbers: load weights and inputs on a real device first"
            return OutputReport(path, self.number, shape, a.dtype, unseen=unseen)
        criterion = self.criterion(judged_as or a.dtype)
        truth = self._truth(a, exact)
        measurement = measure(a, b, criterion, truth)
        inexact = (criterion.tolerance is not None or criterion.sqnr is not None) and a.numel() > 0
        report = OutputReport(
            path,
            self.number,
            shape,
            a.dtype,
            measurement,
            sqnr_db=sqnr_db(a if truth is None else truth, b) if inexact else None,
            original_sqnr_db=None if truth is None else sqnr_db(truth, a),
            reference=("original" if truth is None else "float64") if inexact else None,
            tolerance=criterion.tolerance,
            tolerance_source=criterion.source,
            unseen=_unseen(a, b, measurement),
        )
        # Quantized tensors have to be equal like integers, but stand for floating-point numbers.
        report = replace(report, floating=report.unseen is None and (inexact or a.is_quantized))
        if criterion.sqnr is not None:
            return _by_ratio(replace(report, cosine=cosine(a, b) if inexact else None), criterion)
        problem = _differences(measurement, criterion)
        excused = problem is not None and truth is not None and is_rounding(a, b, truth, criterion)
        return replace(report, problem=None if excused else problem, excused=problem if excused else None)

    def _problem(self, path: str, problem: str) -> OutputReport:
        return OutputReport(path, self.number, problem=problem)


def differing(
    expected: Mapping[str, object],
    found: Mapping[str, object],
    computes_with: Iterable[object] = (),
    *,
    sqnr: float | None = None,
) -> Iterator[OutputReport]:
    """Compare values by name, by the criterion of `verify`, and yield reports on those that differ.

    Args:
        expected: values of the original.
        found: values of the other.
        computes_with: the parameters of the original, or else its inputs, whose dtypes tell how exact it is.
        sqnr: the lowest signal-to-noise ratio in dB, in place of the tolerance.

    >>> [each.path for each in differing({"x": torch.ones(2), "y": 1}, {"x": torch.ones(2) + 1e-7, "y": 2})]
    ['y']
    """
    judge = Judge(0, dtypes_of(computes_with), UNSTATED if sqnr is None else Bounds(sqnr=sqnr, source="promised"))
    # Judging takes a second for some million elements, and most of the values are equal.
    others = {path for path in {**expected, **found} if not _are_equal(expected.get(path), found.get(path))}
    left, right = ({path: each for path, each in tree.items() if path in others} for tree in (expected, found))
    return (report for report in judge.parts(left, right) if not report.passed)


def _are_equal(a: object, b: object) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or _other_kind(a, b) is not None:
        return False
    return a.layout is torch.strided and not a.is_meta and torch.equal(a, b)


def dtypes_of(tensors: Iterable[object]) -> frozenset[torch.dtype]:
    """Return the dtypes in which a model with these tensors computes, including that of autocast."""
    usual = {torch.float64, torch.float32, torch.bfloat16, torch.float16}  # narrower ones are only for storage
    given = [each for each in tensors if isinstance(each, Tensor)]
    found = {each.dtype.to_real() for each in given if each.is_floating_point() or each.is_complex()}
    kinds = {each.device.type for each in given}
    casting = {kind for kind in kinds if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)}
    return frozenset((found & usual) | {torch.get_autocast_dtype(kind) for kind in casting})


def describe(value: object) -> str:
    """Describe a value in a few words."""
    if isinstance(value, Container):
        return f"{value.kind} of {value.size}"
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def _other_kind(a: Tensor, b: Tensor) -> str | None:
    if a.shape != b.shape:
        return f"has shape {tuple(b.shape)}, expected {tuple(a.shape)} as in the original"
    for name in ("dtype", "device", "layout"):
        if getattr(a, name) != getattr(b, name):
            return f"has {name} {getattr(b, name)}, expected {getattr(a, name)} as in the original"
    return None


def _unseen(a: Tensor, b: Tensor, measurement: Measurement) -> str | None:
    """Return why no number of two tensors of the same kind was compared; None if one was."""
    if not a.numel():
        return "has no elements"
    if measurement.nans == a.numel():
        return "is NaN throughout in both"
    if measurement.passed and not any(wide(tensor).isfinite().any() for tensor in (a, b)):
        return "is infinite or NaN throughout in both"
    return None


def _by_ratio(report: OutputReport, criterion: Criterion) -> OutputReport:
    """Return a report with the verdict by its signal-to-noise ratio."""
    ratio = report.sqnr_db
    if criterion.sqnr is None or ratio is None:  # an empty tensor has no ratio
        return report
    least = least_sqnr_db(criterion.sqnr, report.original_sqnr_db)
    problem = None
    if ratio < least:
        problem = f"has a signal-to-noise ratio of {ratio:.1f} dB, expected {least:.1f} dB {criterion.source}"
        problem += "" if report.cosine is None else f"; cosine similarity {report.cosine:.4f}"
        problem += f"; max absolute error {report.max_absolute_error:.3g}"
    return replace(report, least_sqnr_db=least, tolerance_source=criterion.source, problem=problem)


def _differences(measurement: Measurement, criterion: Criterion) -> str | None:
    worst = measurement.worst
    if measurement.passed or worst is None:
        return None
    absolute, relative = measurement.max_absolute_error, measurement.max_relative_error
    numbers = f"max absolute error {absolute:.3g}, max relative error {relative:.3g}"
    found, expected = (f"{v:.6g}" if isinstance(v, (float, complex)) else v for v in (worst.found, worst.expected))
    place = f"{f'at {list(worst.index)}: ' if worst.index else ''}found {found}, expected {expected}"
    if not measurement.differing and measurement.relative_rms is not None:
        return (
            f"differs by {measurement.relative_rms:.3g} of the size of its elements, or of those of one magnitude, "
            f"expected at most 0.1; {place}; {numbers}"
        )
    limit = "exactly that" if criterion.tolerance is None else f"within {worst.allowed:.3g} ({criterion.text})"
    return f"differs in {counted(measurement.differing, 'element')}, worst {place} {limit}; {numbers}"


def tokens_of(outcome: Outcome) -> Tensor | None:
    """Return where the attention mask of a call has tokens, if it also has padding; else None."""
    mask = outcome.arguments.get("kwargs['attention_mask']")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    tokens = mask != 0
    return tokens if tokens.any() and not tokens.all() else None


def _of_tokens(tree: Mapping[str, object], tokens: Tensor) -> dict[str, object]:
    """Return the parts of an output with zeros for padding."""
    return {
        # The mask (batch, tokens) gets as many trailing dimensions as the value has: (batch, tokens, 1, ...).
        path: value.masked_fill(~tokens.view(*tokens.shape, *[1] * (value.dim() - 2)), 0)
        if isinstance(value, Tensor) and value.shape[:2] == tokens.shape and value.layout is torch.strided
        else value
        for path, value in tree.items()
    }
