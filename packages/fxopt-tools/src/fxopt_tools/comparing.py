"""Comparing what two runs left behind, place by place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fxopt_core import PreconditionError, Tolerance, tolerance
from fxopt_tools.measuring import Criterion, Measurement, is_rounding, measure, sqnr_db
from fxopt_tools.report import OutputReport
from fxopt_tools.running import Outcome
from fxopt_tools.structure import Branch, Leaf, Tree, equal, has_value, leaves, tensors

_AFTER = " after the call"
_RELATED_DB = 10.0
_FINER = 64


@dataclass(frozen=True)
class Judge:
    """Compares outcomes of one input.

    Attributes:
        number: which of the inputs it is.
        computed_in: dtypes that the original computes in; an output is judged by the coarsest of these and its own,
            since a model in bfloat16 that returns float32 is no more exact for it.
        rtol: relative tolerance that the caller stated, or None.
        atol: absolute tolerance that the caller stated, or None.
    """

    number: int = 0
    computed_in: frozenset[torch.dtype] = frozenset()
    rtol: float | None = None
    atol: float | None = None

    def compare(self, expected: Outcome, found: Outcome, reference: Outcome | None = None) -> list[OutputReport]:
        """Compare all values of the outputs, and the arguments that either run wrote into.

        Args:
            expected: what the original left behind.
            found: what the transformed left behind.
            reference: what the original left behind in float64, or None.
        """
        wide = {} if reference is None else tensors(reference.output, "output")
        reports = list(self._trees("output", expected.output, found.output, wide))
        return [*reports, *self._arguments(expected, found, reference)]

    def _arguments(self, expected: Outcome, found: Outcome, reference: Outcome | None) -> Iterator[OutputReport]:
        """Compare the arguments after the call: what either run touched, and all that is not what it was.

        Values that are no tensors and were not touched are passed over: they were copied for each run, and copies of
        some objects are not equal.
        """
        wide = {} if reference is None else tensors(reference.arguments)
        touched = expected.touched | found.touched
        others = {
            path.removeprefix(".")
            for tree in (expected.arguments, found.arguments)
            for path, value in leaves(tree)
            if not isinstance(value, Tensor)
        }
        for report in self._trees("", expected.arguments, found.arguments, wide):
            path = report.path.removeprefix(".")
            if path in touched or (not report.passed and path not in others):
                yield replace(report, path=f"{path}{_AFTER}")

    def criterion(self, dtype: torch.dtype) -> Criterion:
        """Return what to allow for an output of a dtype."""
        if not (dtype.is_floating_point or dtype.is_complex):
            return Criterion(None)
        coarsest = self._coarsest(dtype)
        usual = tolerance(coarsest)
        rtol = usual.rtol if self.rtol is None else self.rtol
        atol = usual.atol if self.atol is None else self.atol
        stated = (self.rtol, self.atol) != (None, None)
        eps = None if stated else torch.finfo(coarsest).eps
        return Criterion(Tolerance(rtol, atol), eps, self._source(dtype, coarsest))

    def _source(self, dtype: torch.dtype, coarsest: torch.dtype) -> str:
        """Return where the tolerance comes from."""
        stated = [name for name, value in (("rtol", self.rtol), ("atol", self.atol)) if value is not None]
        if len(stated) == 2:
            return "as stated"
        computed = "" if coarsest == dtype.to_real() else ", in which the original computes"
        usual = f"of {str(coarsest).removeprefix('torch.')}{computed}"
        return f"{stated[0]} as stated, {'atol' if stated == ['rtol'] else 'rtol'} {usual}" if stated else usual

    def _coarsest(self, dtype: torch.dtype) -> torch.dtype:
        return max({dtype.to_real(), *self.computed_in}, key=lambda candidate: torch.finfo(candidate).eps)

    def _reference(self, a: Tensor, wide: Tensor | None) -> Tensor | None:
        """Return what the original gave in float64, or None where that is another quantity or hardly more exact."""
        if not (a.is_floating_point() or a.is_complex()) or not a.numel() or wide is None or wide.shape != a.shape:
            return None
        if not (wide.is_floating_point() or wide.is_complex()):
            return None
        finer = _FINER * torch.finfo(wide.dtype).eps <= torch.finfo(self._coarsest(a.dtype)).eps
        exact = finer or wide.dtype in (torch.float64, torch.complex128)  # float32 is, for a model in half precision
        return wide if exact and sqnr_db(wide, a) >= _RELATED_DB else None

    def _trees(self, path: str, a: Tree, b: Tree, wide: Mapping[str, Tensor]) -> Iterator[OutputReport]:
        if isinstance(a, Branch) and isinstance(b, Branch) and a.kind == b.kind and a.cls is b.cls:
            yield from self._children(path, a, b, wide)
        elif isinstance(a, Leaf) and isinstance(b, Leaf):
            yield self._values(path, a.value, b.value, wide)
        else:
            yield self._problem(path, f"is {describe(b)}, expected {describe(a)} as in the original")

    def _children(self, path: str, a: Branch, b: Branch, wide: Mapping[str, Tensor]) -> Iterator[OutputReport]:
        if not a.children and not b.children:
            yield OutputReport(path, self.number)
        for step in {**a.children, **b.children}:
            inside = f"{path}{step}"
            if step not in b.children:
                yield self._problem(inside, f"is missing, expected {describe(a.children[step])} as in the original")
            elif step not in a.children:
                yield self._problem(inside, f"is {describe(b.children[step])}, which the original does not return")
            else:
                yield from self._trees(inside, a.children[step], b.children[step], wide)

    def _values(self, path: str, a: object, b: object, wide: Mapping[str, Tensor]) -> OutputReport:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return self._tensors(path, a, b, wide)
        if type(a) is type(b) and isinstance(a, (float, complex)) and isinstance(b, (float, complex)):
            return self._numbers(path, a, b)
        if type(a) is type(b) and equal(a, b):
            return OutputReport(path, self.number)
        if type(a) is type(b) and not has_value(a):
            return self._problem(
                path,
                f"is of type {type(b).__name__} in both, which does not tell whether two of them are equal: return "
                "what it holds, in a list or a mapping, or compare it yourself",
            )
        return self._problem(path, f"is {describe(Leaf(b))}, expected {describe(Leaf(a))} as in the original")

    def _numbers(self, path: str, a: float | complex, b: float | complex) -> OutputReport:
        """Compare Python numbers as results in float32: as a rule they are the ``item()`` of such a tensor."""
        criterion = self.criterion(torch.float32)
        dtype = torch.complex128 if isinstance(a, complex) else torch.float64
        measurement = measure(torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype), criterion)
        problem = _differences(measurement, criterion)
        return OutputReport(
            path,
            self.number,
            measurement=measurement,
            tolerance=criterion.tolerance,
            tolerance_source=criterion.source,
            problem=problem,
        )

    def _tensors(self, path: str, a: Tensor, b: Tensor, wide: Mapping[str, Tensor]) -> OutputReport:
        shape = tuple(a.shape)
        different = _other_kind(a, b)
        if different is not None:
            return OutputReport(path, self.number, shape, a.dtype, problem=different)
        if a.is_meta:
            raise PreconditionError(
                f"`{path}` of input {self.number} is on the meta device and holds no numbers to compare: load weights "
                "and inputs on a real device first, for example by module.to_empty(device='cpu') and load_state_dict"
            )
        criterion = self.criterion(a.dtype)
        truth = self._reference(a, wide.get(path))
        measurement = measure(a, b, criterion, truth)
        problem = _differences(measurement, criterion)
        excused = problem is not None and criterion.eps is not None and truth is not None and is_rounding(a, b, truth)
        inexact = criterion.tolerance is not None and a.numel() > 0
        return OutputReport(
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
            problem=None if excused else problem,
            excused=problem if excused else None,
        )

    def _problem(self, path: str, problem: str) -> OutputReport:
        return OutputReport(path, self.number, problem=problem)


def describe(tree: Tree) -> str:
    """Return in a few words what is at a place."""
    if isinstance(tree, Branch):
        return f"{tree.kind} of {len(tree.children)}"
    value = tree.value
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def _other_kind(a: Tensor, b: Tensor) -> str | None:
    for name, mine, other in (
        ("shape", tuple(a.shape), tuple(b.shape)),
        ("dtype", a.dtype, b.dtype),
        ("device", a.device, b.device),
        ("layout", a.layout, b.layout),
    ):
        if mine != other:
            return f"has {name} {other}, expected {mine} as in the original"
    return None


def _differences(measurement: Measurement, criterion: Criterion) -> str | None:
    worst = measurement.worst
    if measurement.passed or worst is None:
        return None
    limits = criterion.tolerance
    what = "exactly that" if limits is None else f"{worst.allowed:.3g} ({criterion.text})"
    absolute, relative = measurement.max_absolute_error, measurement.max_relative_error
    numbers = f"max absolute error {absolute:.3g}, max relative error {relative:.3g}"
    found, expected = (f"{v:.6g}" if isinstance(v, (float, complex)) else v for v in (worst.found, worst.expected))
    place = f"{f'at {list(worst.index)}: ' if worst.index else ''}found {found}, expected {expected}"
    if not measurement.differing:
        assert measurement.relative_rms is not None
        return (
            f"is small throughout, and differs from the original by {measurement.relative_rms:.3g} of its root mean "
            f"square, expected at most 0.1; {place}; {numbers}"
        )
    within = "" if limits is None else " within"
    return f"differs in {_elements(measurement.differing)}, worst {place}{within} {what}; {numbers}"


def _elements(count: int) -> str:
    return f"{count} element{'' if count == 1 else 's'}"
