"""`bisect`: the one rewrite that makes a check fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.fx import GraphModule

from fxopt_core import PassError, Transformation, faithful_copy, instrumented
from fxopt_tools.judging import CheckOrInputs, Judge, judge_of
from fxopt_tools.limits import BisectLimit
from fxopt_tools.steps import RewriteStep
from fxopt_tools.subjects import Pipeline, as_graph_module, as_transformation

Verdict = Literal["found", "never-fails", "fails-untransformed", "flaky", "unrepeatable"]


@dataclass(frozen=True)
class Trial:
    """One check of what the first rewrites make of the model.

    Attributes:
        limit: how many rewrites were done.
        problem: what was wrong then, or None.
    """

    limit: int
    problem: str | None

    @property
    def good(self) -> bool:
        """Whether the check passed."""
        return self.problem is None


@dataclass(frozen=True)
class Bisection:
    """What `bisect` found; true if it is a culprit.

    Attributes:
        verdict: "found"; "never-fails", where the check passes with all rewrites; "fails-untransformed", where it fails
            without any; "flaky", where it passed and failed with the same ones; "unrepeatable", where the pipeline did
            not do the same rewrites each time.
        culprit: the rewrite that makes the check fail, with all before it; None where the verdict is not "found".
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
        """Return the culprit with all that is known of it, or why there is none."""
        checks = _count(len(self.trials), "check")
        if self.culprit is None:
            return f"no culprit, after {checks}: {self._reason()}"
        place = "" if self.culprit.index is None else f" (pass {self.culprit.index} of the composition)"
        lines = [
            f"rewrite {self.culprit.number} of {self.total} is the culprit, found by {checks}",
            f"  pass: {self.culprit.pass_name}{place}",
            f"  site: {self.culprit.site or '-'}",
            f"  nodes: {', '.join(self.culprit.nodes) or '-'}",
            *(f"  source: {line}" for line in self.culprit.sources),
            f"  problem: {self._problem(self.culprit.number)}",
        ]
        return "\n".join(lines)

    def _problem(self, limit: int | None) -> str:
        found = (trial.problem for trial in self.trials if trial.limit == limit and trial.problem is not None)
        return next(found, "-")

    def _reason(self) -> str:
        if self.verdict == "never-fails":
            return f"the check passes with all {self.total} rewrites, and with fewer as far as it was asked"
        if self.verdict == "fails-untransformed":
            return f"the check fails before anything is rewritten: {self._problem(0)}. Mend the model or the check"
        if self.verdict == "unrepeatable":
            return (
                f"the pipeline did not do the same {_count(self.total, 'rewrite')} each time, so that no rewrite can "
                "be told by its number. Find out what a pass depends on beside its graph (random numbers, sets, time)"
            )
        both = sorted({t.limit for t in self.trials if t.good} & {t.limit for t in self.trials if not t.good})
        return (
            f"the check is flaky: with the same first {_count(both[0], 'rewrite')} it passed once and failed once "
            f"({self._problem(both[0])}). Make it repeatable: fix seeds, run on one thread, loosen its tolerance"
        )


def bisect(
    model: nn.Module,
    pipeline: Pipeline,
    check: CheckOrInputs,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    report: Callable[[str], object] | None = None,
) -> Bisection:
    """Find the one rewrite of a pipeline that makes a check fail.

    The pipeline runs on copies of the model, each time with the first n of its rewrites, as `BisectLimit` numbers them;
    the model stays as it is. Of N rewrites, the culprit is found by at most log2(N) + 2 checks. Those that finding it
    leaves over check again what decides, to notice a flaky check. An error of a pass counts as a failed check.

    Where several rewrites make the check fail, or pass again, it is one of them: the check passes with the rewrites
    before it, and fails with it.

    Args:
        model: a graph module, or a model that ``torch.fx.symbolic_trace`` can trace.
        pipeline: a pass, a composition, or the text of a pipeline.
        check: a function of the transformed module that returns false or raises where it is bad (None is good). Or
            inputs, on which the transformed module has to compute what the model does, as for `verify`.
        rtol: relative tolerance of that comparison; if None, that of the dtype.
        atol: absolute tolerance of that comparison; if None, that of the dtype.
        report: gets a line for each check.

    Raises:
        PreconditionError: The model cannot be traced or refuses the inputs, or an argument makes no sense.
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
    graph_module, transformation = as_graph_module(model, "bisect"), as_transformation(pipeline, "bisect")
    judge = judge_of(check, graph_module, rtol=rtol, atol=atol)
    return _Bisecting(graph_module, transformation, judge, report).result()


class _NotTheSame(Exception):
    """The pipeline did other rewrites than the first time."""


class _Bisecting:
    """One bisection: the first number of rewrites with which the check fails is somewhere from 0 to all and one."""

    def __init__(
        self,
        graph_module: GraphModule,
        transformation: Transformation,
        judge: Judge,
        report: Callable[[str], object] | None,
    ) -> None:
        self._graph_module, self._transformation = graph_module, transformation
        self._judge, self._report = judge, report
        self._trials: list[Trial] = []
        counting = BisectLimit()
        _, error = self._transformed(counting)
        self._steps = counting.steps
        if error is not None:  # perhaps not at a site, but in a pass that looks for sites; it counts as one more step
            self._steps = [*self._steps, RewriteStep(len(self._steps) + 1, error.pass_name or "", error.index)]

    def result(self) -> Bisection:
        """Search, and check again what decides while checks are left."""
        total = len(self._steps)
        good, bad = -1, total + 1  # what is known, or would be: passes with -1, fails with one more than there are
        try:
            while bad - good > 1:
                middle = (good + bad) // 2
                good, bad = (middle, bad) if self._trial(middle).good else (good, middle)
            for limit in (bad, good):
                if 0 <= limit <= total and len(self._trials) < _most_checks(total):
                    again = self._trial(limit)
                    if again.good != (limit == good):
                        return self._bisection("flaky")
        except _NotTheSame:
            return self._bisection("unrepeatable")
        if bad > total:
            return self._bisection("never-fails")
        return self._bisection("fails-untransformed") if bad == 0 else self._bisection("found", self._steps[bad - 1])

    def _bisection(self, verdict: Verdict, culprit: RewriteStep | None = None) -> Bisection:
        return Bisection(verdict, culprit, len(self._steps), tuple(self._trials))

    def _trial(self, limit: int) -> Trial:
        """Check what the first rewrites make of the model.

        Raises:
            _NotTheSame: They are not those of the first time.
        """
        instrument = BisectLimit(limit)
        result, error = self._transformed(instrument)
        if instrument.steps != self._steps[: len(instrument.steps)] or (error is None and self._is_short(instrument)):
            raise _NotTheSame
        trial = Trial(limit, self._judge(result) if error is None else str(error))
        self._trials.append(trial)
        if self._report is not None:
            verdict = "good" if trial.good else f"BAD: {trial.problem}"
            self._report(f"BISECT: {limit} of {len(self._steps)} rewrites: {verdict}")
        return trial

    def _is_short(self, instrument: BisectLimit) -> bool:
        return len(instrument.steps) < min(instrument.limit or 0, len(self._steps))

    def _transformed(self, instrument: BisectLimit) -> tuple[GraphModule, PassError | None]:
        """Transform a copy; return it, or the copy as it was, with the error of a pass."""
        twin = faithful_copy(self._graph_module)
        try:
            with instrumented(instrument):
                return self._transformation(twin), None
        except PassError as error:
            return twin, error


def _most_checks(total: int) -> int:
    """Return the most checks that finding one of so many rewrites may take: log2, rounded down, and two."""
    return max(total, 1).bit_length() + 1


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
