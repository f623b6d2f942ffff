"""`verify`: does a transformed module compute what the original does?"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_core import PreconditionError, Record, faithful_copy, type_text
from fxopt_tools.inputs import Inputs, OneInput, read_inputs
from fxopt_tools.verification.bounds import Bounds, read_bounds, records_of
from fxopt_tools.verification.isolated_run import (
    ONE_AT_A_TIME,
    Outcome,
    gradients_once,
    run_once,
    run_thrice,
    shared_otherwise,
)
from fxopt_tools.verification.judge import Judge, dtypes_of, tokens_of
from fxopt_tools.verification.report import OutputReport, VerificationReport, counted

_SHARE_OF_MEMORY = 0.5
ResultT = TypeVar("ResultT")


def verify(
    original: nn.Module,
    transformed: nn.Module,
    inputs: OneInput | Sequence[OneInput],
    *,
    rtol: float | None = None,
    atol: float | None = None,
    sqnr: float | None = None,
    gradients: bool = False,
) -> VerificationReport:
    """Run two modules on the same inputs and compare everything that they return.

    The transformed module is called three times with each input, since fast paths such as packed weights may start at
    a later call, and every call has to agree. Each run gets copies of the inputs and of the module's buffers, has
    gradients disabled and starts from the same random state; inputs, buffers, attributes of modules and random number
    generators are restored afterwards. (If the first call writes to no buffer, the others have the module's own.) The
    modules keep their mode, so dropout and batch norm in train mode are compared, too.

    Every tensor in nested tuples, lists, mappings, dataclasses, named tuples and other objects is compared, and so are
    arguments and buffers that either module writes to. Floating-point and complex tensors must agree within the
    tolerance of their dtype (or of the dtype in which the original computes, if it is coarser);
    `fxopt_tools.verification.closeness` states the criterion. Python's float and complex are judged as float32.
    Everything else must be equal, and so must structure, shapes, dtypes, devices, layouts and strides of outputs.
    Values that could not be compared are reported; if no floating-point number is left (no elements, NaN throughout,
    only integers), the verification fails: it compared nothing.

    If approximating passes were applied to one of the two, floating-point and complex tensors are held to the
    signal-to-noise ratio that these passes promise (``promised_sqnr``), and their cosine similarity is reported, too.
    Then values for tokens that the argument ``attention_mask`` leaves out are not compared.

    Notes report, without judging, if outputs share other memory.

    Args:
        original: the module before the transformation. Passes work in place, so keep a copy of it.
        transformed: the module after the transformation.
        inputs: a tensor (one positional argument), a tuple (positional arguments), a mapping (keyword arguments),
            `Inputs` (both), or a list of these, verified one after the other.
        rtol: relative tolerance instead of the dtype's.
        atol: absolute tolerance instead of the dtype's. If either is given, both are taken literally: atol is not
            scaled by the magnitude of the output.
        sqnr: the lowest signal-to-noise ratio in dB, in place of tolerances and promises.
        gradients: whether to compare gradients, too: of a weighted sum of the outputs, with respect to floating-point
            inputs and to parameters that both modules have under the same name.

    Returns:
        The report: true if all values agree, and a table when printed. Its signal-to-noise ratios are against a run of
        the original in float64 where possible.

    Raises:
        PreconditionError: A module rejects the inputs (its error is chained), or inputs or bounds are invalid.

    >>> import torch
    >>> report = verify(torch.nn.ReLU(), torch.nn.ReLU6(), [torch.tensor([1.0, -2.0]), torch.tensor([8.0])])
    >>> report.passed, [output.max_absolute_error for output in report.outputs]
    (False, [0.0, 2.0])
    """
    stated, calls = read_bounds(rtol, atol, sqnr), read_inputs(inputs)
    for name, module in {"original": original, "transformed": transformed}.items():
        if not isinstance(module, nn.Module):
            raise PreconditionError(
                f"{name} is {type_text(module)}, expected a torch.nn.Module (of an exported program, .module())"
            )
    before = Original(original, "the original")
    pairs = (  # a generator, since the outputs of all inputs at once could take much memory
        (before.baseline(item, number), run_or_refuse(run_thrice, transformed, item, "the transformed module", number))
        for number, item in enumerate(calls)
    )
    bounds = stated.between(records_of(original), records_of(transformed))
    report = report_on(pairs, bounds, records_of(transformed))
    outputs, notes = report.outputs, report.notes
    # What the original was approximated with is in both models, so `bounds` does not contain it.
    if (known := stated.between(records_of(original), ())) != stated:
        said = f"the original is approximated itself, with the noise {known.source}: what differs may be its error"
        notes = (*notes, f"{said}; verify against the model as it was before")
    if gradients:
        more, note = _gradients(before, transformed, calls, bounds)
        outputs, notes = (*outputs, *more), (*notes, *note)
    if original is transformed:
        notes = (*notes, "original and transformed are the same object, which agrees with itself: transform a copy")
    return VerificationReport(outputs, notes)


@dataclass(frozen=True)
class Baseline:
    """The results of the original on one input.

    Attributes:
        number: which of the inputs it is.
        outcomes: those of three calls, one after the other; equal outcomes are the very same object as the first.
        reference: its outcome in float64, if it has one.
        computed_in: the dtypes in which it computes.
        strides: the strides of its outputs with gradients, where its layers have a fast path without.
    """

    number: int
    outcomes: Sequence[Outcome]
    reference: Outcome | None
    computed_in: frozenset[torch.dtype]
    strides: Mapping[str, tuple[int, ...]]


class Original:
    """A module before it is transformed, and a copy of it in float64 that is made on first use.

    The output of the copy, on inputs cast to float64, is that of the original without rounding. Not every model can
    have such a copy: dtype casts in its code, kernels without float64 or a lack of memory may prevent it.
    """

    def __init__(self, module: nn.Module, who: str) -> None:
        self._module, self._who = module, who

    def baseline(self, inputs: Inputs, number: int) -> Baseline:
        """Run the original, and its copy in float64.

        Raises:
            PreconditionError: The original rejects the inputs; its error is chained.
        """
        with ONE_AT_A_TIME:
            outcomes = run_or_refuse(run_thrice, self._module, inputs, self._who, number)
            strides = self._strides_with_gradients(inputs)
            return Baseline(number, outcomes, self._in_float64(inputs, run_once), self.computes_in(inputs), strides)

    def _strides_with_gradients(self, inputs: Inputs) -> Mapping[str, tuple[int, ...]]:
        """Return the strides of outputs where attention of torch's own layers takes no fast path."""
        was = torch.backends.mha.get_fastpath_enabled()
        if not was or not any(isinstance(each, nn.MultiheadAttention) for each in self._module.modules()):
            return {}
        # Captured graphs do not take the fast path, whose results have other strides.
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return run_once(self._module, inputs).strides
        finally:
            torch.backends.mha.set_fastpath_enabled(was)

    def gradients(self, inputs: Inputs, number: int) -> tuple[dict[str, Tensor], Mapping[str, Tensor]]:
        """Return the gradients of the original, and those of its copy in float64, if it has one.

        Raises:
            PreconditionError: The original rejects the inputs; its error is chained.
        """
        with ONE_AT_A_TIME:
            expected = run_or_refuse(gradients_once, self._module, inputs, f"{self._who}, with gradients,", number)
            return expected, self._in_float64(inputs, gradients_once) or {}

    def computes_in(self, inputs: Inputs) -> frozenset[torch.dtype]:
        """Return the dtypes in which the original computes."""
        return dtypes_of([*self._module.parameters()] or inputs.tensors().values())

    @cached_property
    def _copy(self) -> nn.Module | None:
        """The copy in float64; None if it would not fit: the system may kill a process that takes too much memory."""
        module = self._module
        tensors = [*module.parameters(), *module.buffers()]
        needed = 8 * sum(tensor.numel() for tensor in tensors if tensor.device.type == "cpu")
        with suppress(AttributeError, OSError, ValueError):  # not known on every system
            if needed > _SHARE_OF_MEMORY * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
                return None
        with suppress(Exception), torch.no_grad():
            return (faithful_copy(module) if isinstance(module, GraphModule) else copy.deepcopy(module)).double()
        return None

    def _in_float64(self, inputs: Inputs, run: Callable[..., ResultT]) -> ResultT | None:
        with suppress(Exception):  # of any kind: verification works without a reference, too
            return None if self._copy is None else run(self._copy, inputs, widened=True)
        return None


def baselines(module: nn.Module, inputs: Sequence[Inputs], who: str) -> list[Baseline]:
    """Run a module on each of several inputs, before it is transformed."""
    original = Original(module, who)
    return [original.baseline(item, number) for number, item in enumerate(inputs)]


def report_on(
    pairs: Iterable[tuple[Baseline, Iterable[Outcome]]], bounds: Bounds, records: Sequence[Record] = ()
) -> VerificationReport:
    """Compare the outcomes of each input's calls with its baseline; records of passes explain differences."""
    outputs: list[OutputReport] = []
    notes: dict[str, None] = {}  # a dictionary keeps the order and drops repetitions
    for base, calls in pairs:
        first, compared = base.outcomes[0], dict[str, OutputReport]()
        known: list[tuple[Outcome, Outcome]] = []
        for expected, found in zip(base.outcomes, calls, strict=True):
            # Equal outcomes are one object, and a pair that was compared before shows nothing new.
            if any(expected is one and found is other for one, other in known):
                continue
            is_first, reference = not known, base.reference if expected is first else None
            known.append((expected, found))
            either = {path: strides for path, strides in base.strides.items() if found.strides.get(path) == strides}
            wanted = replace(expected, strides={**expected.strides, **either})
            for report in Judge(base.number, base.computed_in, bounds).compare(wanted, found, reference):
                former = compared.get(report.path)
                if former is not None and not former.passed:
                    continue
                if not is_first and report.problem is not None:
                    report = replace(
                        report, problem=f"{report.problem}; so it is after several calls, not at the first"
                    )
                compared[report.path] = report
            notes |= dict.fromkeys(_notes(expected, found, compared.values()))
        notes |= dict.fromkeys(_hidden_nans(compared.values(), records))
        if bounds.sqnr is not None and tokens_of(first) is not None:
            notes["not compared: what is computed for the padding of `attention_mask`, which is never read"] = None
        outputs += compared.values()
    return VerificationReport(tuple(outputs), tuple(notes))


def run_or_refuse(
    run: Callable[[nn.Module, Inputs], ResultT], module: nn.Module, inputs: Inputs, who: str, number: int
) -> ResultT:
    """Run a module in some way.

    Raises:
        PreconditionError: The module raises; its error is chained.
    """
    try:
        return run(module, inputs)
    except PreconditionError:
        raise
    except Exception as error:
        given = ", ".join(f"{path}: {t.dtype} {tuple(t.shape)} on {t.device}" for path, t in inputs.tensors().items())
        raise PreconditionError(
            f"{who} ({type(module).__name__}) refuses input {number} ({given or 'no tensors'}): "
            f"{type(error).__name__}: {error}. Expected inputs that both modules accept: call the module on them "
            "yourself, or verify with others"
        ) from error


def _gradients(
    before: Original, transformed: nn.Module, inputs: Sequence[Inputs], bounds: Bounds
) -> tuple[list[OutputReport], list[str]]:
    """Compare the gradients of both modules; return reports, and a note on those that only the original has."""
    outputs, alone = list[OutputReport](), dict[str, None]()
    for number, item in enumerate(inputs):
        expected, exact = before.gradients(item, number)
        found = run_or_refuse(gradients_once, transformed, item, "the transformed module, with gradients,", number)
        outputs += Judge(number, before.computes_in(item), bounds).gradients(expected, found, exact)
        alone |= dict.fromkeys(path for path in expected if path not in found)
    if not alone:
        return outputs, []
    first, *others = alone
    more = f" and {counted(len(others), 'other')}" if others else ""
    return outputs, [f"not compared: the {first}{more}, since the transformed module has no parameter of that name"]


def _notes(expected: Outcome, found: Outcome, outputs: Iterable[OutputReport]) -> Iterator[str]:
    for who, outcome in (("original", expected), ("transformed module", found)):
        for name in outcome.parameters_written:
            yield f"the {who} writes to its parameter `{name}` as it runs, and this was not undone: verify a copy of it"
    for path, one, other in shared_otherwise(expected, found):
        yield (
            f"`{path}` shares memory with {one} in the original, and with {other} in the transformed module: "
            "writing to it later changes other values"
        )
    for output in outputs:
        nans = 0 if output.measurement is None or output.unseen else output.measurement.nans
        if nans:
            yield f"`{output.path}` of input {output.number} has {counted(nans, 'element')} that are NaN in both"


def _hidden_nans(outputs: Iterable[OutputReport], records: Sequence[Record]) -> Iterator[str]:
    """Yield notes on outputs that have lost NaN, with the notes of passes on it."""
    said = dict.fromkeys(
        f"; {record.pass_name}: {rewrite.note}"
        for record in records
        for rewrite in record.rewrites
        if record.state == "applied" and "NaN" in rewrite.note
    )
    for output in outputs:
        lost = 0 if output.measurement is None else output.measurement.lost_nans
        if lost:
            elements = f"{counted(lost, 'element')} that {'is' if lost == 1 else 'are'} NaN only in the original"
            yield f"`{output.path}` of input {output.number} has {elements}{''.join(said)}"
