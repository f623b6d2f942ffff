"""`bisect`: find the one rewrite that makes a check fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import nn
from torch.fx import GraphModule

from fxopt_core import PassError, PreconditionError, faithful_copy, instrumented
from fxopt_tools.inputs import OneInput, read_inputs
from fxopt_tools.rewrite_steps import BisectLimit, RewriteStep
from fxopt_tools.subjects import Pipeline, as_graph_module, as_transformation
from fxopt_tools.verification.bounds import Bounds, read_bounds, records_of
from fxopt_tools.verification.isolated_run import run_thrice
from fxopt_tools.verification.report import counted
from fxopt_tools.verification.verify import baselines, report_on, run_or_refuse

Verdict = Literal["found", "never-fails", "fails-untransformed"]
#: A function to call with the transformed module, or inputs to verify it on.
CheckOrInputs: TypeAlias = "Callable[[GraphModule], object] | OneInput | Sequence[OneInput]"
Diagnosis: TypeAlias = "Callable[[GraphModule], str | None]"  # returns what is wrong with a module, or None


@dataclass(frozen=True)
class Trial:
    """One check of the model after its first rewrites.

    Attributes:
        limit: how many rewrites were done.
        problem: what was wrong, or None.
    """

    limit: int
    problem: str | None


@dataclass(frozen=True)
class Bisection:
    """The result of `bisect`; true if it found a culprit.

    Attributes:
        verdict: "found"; "never-fails" if the check passes with all rewrites; "fails-untransformed" if it fails without
            any.
        culprit: the rewrite that makes the check fail, given those before it; None unless the verdict is "found".
        total: how many rewrites the pipeline does.
        trials: the checks, in order.
    """

    verdict: Verdict
    culprit: RewriteStep | None
    total: int
    trials: tuple[Trial, ...]

    def __bool__(self) -> bool:
        """Return whether there is a culprit."""
        return self.culprit is not None

    def __str__(self) -> str:
        """Describe the culprit, or say why there is none."""
        checks = counted(len(self.trials), "check")
        problems = {each.limit: each.problem for each in self.trials}
        if self.verdict == "never-fails":
            return f"no culprit, after {checks}: the check passes with all {self.total} rewrites"
        if self.culprit is None:
            problem = f"the check fails before anything is rewritten: {problems[0]}. Fix the model or the check"
            return f"no culprit, after {checks}: {problem}"
        place = "" if self.culprit.index is None else f" (pass {self.culprit.index} of the composition)"
        sources = "".join(f"  source: {line}\n" for line in self.culprit.sources)
        return (
            f"rewrite {self.culprit.number} of {self.total} is the culprit, found by {checks}\n"
            f"  pass: {self.culprit.pass_name}{place}\n"
            f"  site: {self.culprit.site or '-'}\n"
            f"  nodes: {', '.join(self.culprit.nodes) or '-'}\n"
            f"{sources}  problem: {problems[self.culprit.number or 0]}"
        )


def bisect(
    model: nn.Module,
    pipeline: Pipeline,
    check: CheckOrInputs,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    sqnr: float | None = None,
) -> Bisection:
    """Find the one rewrite of a pipeline that makes a check fail.

    The pipeline runs on copies of the model, each time with only the first n of its rewrites, as `BisectLimit` numbers
    them; the model itself is not changed. The culprit among N rewrites is found in at most log2(N) + 2 checks. An error
    of a pass counts as a failed check. If several rewrites make the check fail, or pass again, the culprit is one of
    them: the check passes with the rewrites before it and fails with it.

    Args:
        model: a graph module, or a model that ``torch.fx.symbolic_trace`` can trace.
        pipeline: a pass, a composition, or the text of a pipeline.
        check: a function of the transformed module that returns false or raises if the module is bad; None, which a
            function of assertions returns, is good. Or inputs, as for `verify`, on which the transformed module must
            compute the same as the model.
        rtol: relative tolerance for inputs; None for the dtype's.
        atol: absolute tolerance for inputs; None for the dtype's.
        sqnr: the lowest signal-to-noise ratio in dB for inputs, in place of tolerances and of the passes' promises.

    Raises:
        PreconditionError: The model cannot be traced or rejects the inputs, an argument is invalid, or the pipeline
            does not make the same rewrites each time.
        RegistryError: The text of the pipeline names an unknown pass.

    >>> import torch
    >>> from fxopt_core import Transformation
    >>> class Forget(Transformation):
    ...     def transform(self, graph_module):
    ...         relu = next(node for node in graph_module.graph.nodes if node.op == "call_module")
    ...         relu.replace_all_uses_with(relu.args[0])
    ...         return graph_module
    >>> print(bisect(torch.nn.Sequential(torch.nn.ReLU()), Forget(), torch.tensor([-1.0])))
    rewrite 1 of 1 is the culprit, found by 2 checks
      pass: forget
      site: -
      nodes: -
      problem: `output` of input 0 ...
    """
    graph_module, transformation = as_graph_module(model, "bisect"), as_transformation(pipeline)
    bounds = read_bounds(rtol, atol, sqnr)
    if not callable(check):
        diagnose = _verification(check, graph_module, bounds)
    elif not bounds.stated:
        diagnose = _own_check(check)
    else:
        raise PreconditionError(
            f"rtol={rtol}, atol={atol} and sqnr={sqnr} are for outputs on inputs, but the check is a function: give "
            "inputs instead, or let the function use tolerances of its own"
        )

    def transformed(instrument: BisectLimit) -> tuple[GraphModule, PassError | None]:
        """Transform a copy; return it, rolled back and with the error if a pass fails."""
        duplicate = faithful_copy(graph_module)
        try:
            with instrumented(instrument):
                return transformation(duplicate), None
        except PassError as error:
            return duplicate, error

    everything = BisectLimit()
    _, error = transformed(everything)
    steps, trials = everything.steps, list[Trial]()
    if error is not None:  # it may come from a pass that was still looking for sites, so it counts as a step
        steps = [*steps, RewriteStep(len(steps) + 1, error.pass_name or "", error.index)]
    good, bad = -1, len(steps) + 1  # the check passes with `good` rewrites and fails with `bad`; both ends are assumed
    while bad - good > 1:
        middle = (good + bad) // 2
        limit = BisectLimit(middle)
        result, error = transformed(limit)
        short = error is None and len(limit.steps) < min(middle, len(steps))
        if short or limit.steps != steps[: len(limit.steps)]:
            raise PreconditionError(
                f"the pipeline did not do the same {counted(len(steps), 'rewrite')} each time, so a number does not "
                "identify a rewrite. Find out what a pass depends on besides its graph (random numbers, sets, time)"
            )
        problem = diagnose(result) if error is None else str(error)
        trials.append(Trial(middle, problem))
        good, bad = (middle, bad) if problem is None else (good, middle)
    # `bad` is 0 if the untransformed model fails, and beyond the last step if nothing fails.
    culprit = steps[bad - 1] if 0 < bad <= len(steps) else None
    verdict: Verdict = "found" if culprit is not None else "never-fails" if bad else "fails-untransformed"
    return Bisection(verdict, culprit, len(steps), tuple(trials))


def _own_check(check: Callable[[GraphModule], object]) -> Diagnosis:
    def diagnose(graph_module: GraphModule) -> str | None:
        try:
            found = check(graph_module)
            if found is None or found:
                return None
        except Exception as error:  # any error means that the check failed
            return f"the check raised {type(error).__name__}: {error}"
        return f"the check returned {next(iter(str(found).splitlines()), repr(found))}"

    return diagnose


def _verification(inputs: OneInput | Sequence[OneInput], graph_module: GraphModule, bounds: Bounds) -> Diagnosis:
    read = read_inputs(inputs)
    expected, known = baselines(graph_module, read, "the model"), records_of(graph_module)

    def diagnose(transformed: GraphModule) -> str | None:
        try:
            pairs = enumerate(read)
            found = [run_or_refuse(run_thrice, transformed, item, "the module", number) for number, item in pairs]
        except PreconditionError as error:
            return str(error)
        return report_on(zip(expected, found, strict=True), bounds.between(known, records_of(transformed))).problem

    return diagnose
