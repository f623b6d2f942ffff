"""`Behaviour`: everything that a call of a module does; differences by the criterion of `verify`."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxopt_core import faithful_copy
from fxopt_tools import Inputs, verify
from fxopt_tools.verification.isolated_run import Outcome, gradients_once, run_once, shared_otherwise
from fxopt_tools.verification.judge import Judge, dtypes_of


@dataclass(frozen=True)
class Behaviour:
    """What one call of a module returned and changed.

    Attributes:
        outcome: what it returned, and arguments and buffers after the call.
        computed_in: the dtypes that the module computes in.
        gradients: names of inputs and parameters to gradients.
        refused: why there are no gradients; None where there are.
    """

    outcome: Outcome
    computed_in: frozenset[torch.dtype]
    gradients: Mapping[str, Tensor]
    refused: str | None = None


def behaviour_of(graph_module: GraphModule, inputs: Inputs, *, gradients: bool = True) -> Behaviour:
    """Call a module without gradients, and again with them, from the same random state, and restore it.

    Raises:
        Exception: Whatever the module raises.
    """
    computed_in = dtypes_of([*graph_module.parameters(), *graph_module.buffers(), *inputs.tensors().values()])
    with contextlib.redirect_stderr(io.StringIO()):  # torch prints what it raises
        # A pass may return a slice of something larger, if it says so: strides are for `verify` to judge.
        outcome = replace(run_once(graph_module, inputs), strides={})
        try:
            found = gradients_once(graph_module, inputs) if gradients else {}
        except RuntimeError as error:
            return Behaviour(outcome, computed_in, {}, str(error))
    return Behaviour(outcome, computed_in, found)


@dataclass(frozen=True)
class Difference:
    """One difference between two behaviours.

    Attributes:
        what: "outputs", "effects" or "gradients".
        text: the second behaviour, and what was expected.
        is_rounding: whether only numbers differ, so that a closer look may excuse it.
    """

    what: str
    text: str
    is_rounding: bool = False


def differences(expected: Behaviour, found: Behaviour) -> Iterator[Difference]:
    """Yield how two behaviours differ beyond the tolerance of the dtype that the model computes in."""
    judge, before, after = Judge(computed_in=expected.computed_in), expected.outcome, found.outcome
    for report in judge.compare(before, after):
        if not report.passed:
            what = "outputs" if report.path in {**before.output, **after.output} else "effects"
            yield Difference(what, f"`{report.path}` {report.problem}", report.floating)
    for path, was, now in shared_otherwise(before, after):
        yield Difference("effects", f"`{path}` shares memory with {now}, expected {was} as in the original")
    if expected.refused is not None:
        return  # torch refuses gradients of some in-place operations; a rewrite may make them possible
    if found.refused is not None:
        yield Difference("gradients", f"torch refuses to compute gradients, as it did not before: {found.refused}")
    for report in judge.gradients(expected.gradients, found.gradients, {}):
        if not report.passed:
            yield Difference("gradients", f"the {report.path} {report.problem}", report.floating)


def unlike(
    source: GraphModule, result: GraphModule, inputs: Inputs, expected: Behaviour, found: Behaviour
) -> list[Difference]:
    """Return how a result differs from its source; numbers only where float64 does not excuse them."""
    all_found = list(differences(expected, found))
    if not all_found or not all(each.is_rounding for each in all_found):
        return all_found
    # `verify` also runs the source in float64, which takes longer: only where numbers differ.
    gradients = any(each.what == "gradients" for each in all_found)
    return [] if verify(faithful_copy(source), faithful_copy(result), inputs, gradients=gradients).passed else all_found
