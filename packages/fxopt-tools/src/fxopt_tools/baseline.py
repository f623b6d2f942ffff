"""What a module computes before it is transformed, and reports on what it computes afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fxopt_core import PreconditionError
from fxopt_tools.comparing import Judge
from fxopt_tools.inputs import Inputs
from fxopt_tools.reference import Reference
from fxopt_tools.report import OutputReport, VerificationReport
from fxopt_tools.running import Outcome, run_once


@dataclass(frozen=True)
class Baseline:
    """What the original makes of one input.

    Attributes:
        number: which of the inputs it is.
        outcome: what the original left behind.
        reference: what it left behind in float64, or why that is not known.
        computed_in: the dtypes in which it computes.
    """

    number: int
    outcome: Outcome
    reference: Outcome | str
    computed_in: frozenset[torch.dtype]


def baseline(module: nn.Module, inputs: Inputs, who: str, number: int, reference: Reference) -> Baseline:
    """Run the original, and its copy in float64.

    Raises:
        PreconditionError: The original refuses the inputs; its error is chained.
    """
    outcome = run_or_refuse(module, inputs, who, number)
    return Baseline(number, outcome, reference.run(inputs), dtypes_of(module, inputs))


def report_on(
    pairs: Iterable[tuple[Baseline, Outcome]], *, rtol: float | None, atol: float | None
) -> VerificationReport:
    """Compare each outcome with its baseline."""
    outputs: list[OutputReport] = []
    notes: dict[str, None] = {}  # a dictionary keeps the order and drops repetitions
    for base, found in pairs:
        wide = None if isinstance(base.reference, str) else base.reference
        compared = Judge(base.number, base.computed_in, rtol, atol).compare(base.outcome, found, wide)
        outputs += compared
        notes |= dict.fromkeys(_notes(base, found, compared))
    return VerificationReport(tuple(outputs), tuple(notes))


def run_or_refuse(module: nn.Module, inputs: Inputs, who: str, number: int) -> Outcome:
    """Run a module.

    Raises:
        PreconditionError: It raises; its error is chained.
    """
    try:
        return run_once(module, inputs)
    except PreconditionError:
        raise
    except Exception as error:
        given = ", ".join(f"{path}: {t.dtype} {tuple(t.shape)} on {t.device}" for path, t in inputs.tensors().items())
        raise PreconditionError(
            f"{who} ({type(module).__name__}) refuses input {number} ({given or 'no tensors'}): "
            f"{type(error).__name__}: {error}. Expected inputs that both modules accept: call the module on them "
            "yourself, or verify with others"
        ) from error


def dtypes_of(module: nn.Module, inputs: Inputs) -> frozenset[torch.dtype]:
    """Return the dtypes that a module computes in: those of its parameters, or else of the inputs, and of autocast."""
    tensors: list[Tensor] = [*module.parameters()] or [*inputs.tensors().values()]
    usual = {torch.float64, torch.float32, torch.bfloat16, torch.float16}  # narrower ones only store
    found = {tensor.dtype.to_real() for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()}
    kinds = {tensor.device.type for tensor in tensors}
    casting = {kind for kind in kinds if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)}
    return frozenset((found & usual) | {torch.get_autocast_dtype(kind) for kind in casting})


def _notes(base: Baseline, found: Outcome, outputs: Iterable[OutputReport]) -> Iterable[str]:
    for who, outcome in (("original", base.outcome), ("transformed module", found)):
        for name in outcome.parameters_written:
            yield (
                f"the {who} writes into its parameter `{name}` as it runs, and this was not undone: verify a copy of it"
            )
    for path in sorted(base.outcome.shared.keys() | found.shared.keys()):
        shared = [" and ".join(outcome.shared.get(path, ("no argument",))) for outcome in (base.outcome, found)]
        if shared[0] != shared[1]:
            yield (
                f"`{path}` shares memory with {shared[0]} in the original, and with {shared[1]} in the transformed "
                "module: whoever writes into it later alters other values"
            )
    alone = [output.path for output in outputs if output.reference == "original"]
    if isinstance(base.reference, str):
        if alone:
            yield f"SQNR is against the original's own output, because its run in float64 failed: {base.reference}"
        return
    for path in alone:
        yield (
            f"SQNR of `{path}` is against the original's own output: run in float64, the original gave another dtype "
            "or shape there, or numbers too far from it (by other random numbers, or another branch)"
        )
