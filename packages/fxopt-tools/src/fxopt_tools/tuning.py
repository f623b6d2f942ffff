"""`tune`: keep only what helps on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.fx import GraphModule

from fxopt_core import PassError, Transformation, compose, instrumented
from fxopt_core.execution import leaves
from fxopt_tools.benchmark import Progress, cells, name_of
from fxopt_tools.inputs import OneInput
from fxopt_tools.limits import LeaveOut
from fxopt_tools.sampling import Ratio, Sampler, noise_of
from fxopt_tools.steps import RewriteStep
from fxopt_tools.subjects import Pipeline, as_graph_module, as_transformation
from fxopt_tools.tables import text_table
from fxopt_tools.variants import Part, Variants


@dataclass(frozen=True)
class Decision:
    """What `tune` made of one pass or one rewrite.

    Attributes:
        part: the pass or the rewrite.
        kept: whether it is kept.
        reason: why, in a few words.
        effect: how many times longer the model took without it, beside all that was kept then; None where that was not
            measured.
    """

    part: RewriteStep
    kept: bool
    reason: str
    effect: Ratio | None = None

    @property
    def name(self) -> str:
        """Pass and site."""
        return name_of(self.part)


@dataclass(frozen=True)
class Tuning:
    """What `tune` kept and dropped; true if anything helps.

    Attributes:
        transformation: the passes of which anything was kept, in order.
        decisions: what was made of each pass or rewrite, in order.
        speedup: how many times longer the original takes than the model with what was kept; None where nothing was.
        noise: how far from 1 the ratio of two copies of the original was.
    """

    transformation: Transformation
    decisions: tuple[Decision, ...]
    speedup: Ratio | None
    noise: float
    _pipeline: Transformation

    @property
    def kept(self) -> tuple[Decision, ...]:
        """What is kept."""
        return tuple(decision for decision in self.decisions if decision.kept)

    @property
    def dropped(self) -> tuple[Decision, ...]:
        """What is dropped."""
        return tuple(decision for decision in self.decisions if not decision.kept)

    def apply(self, graph_module: GraphModule) -> GraphModule:
        """Run the pipeline on a graph module, in place, with all left out that was dropped."""
        with instrumented(LeaveOut(*(decision.part for decision in self.dropped))):
            return self._pipeline(graph_module)

    def __bool__(self) -> bool:
        """Return whether anything is kept."""
        return bool(self.kept)

    def __str__(self) -> str:
        """Return a table of what was kept and dropped, and what is gained by it."""
        gain = "nothing helps on this model and machine: leave it as it is"
        if self.speedup is not None:
            gain = f"kept {len(self.kept)} of {len(self.decisions)}: speed-up {self.speedup}"
        rows = [("", "pass", "time without", "interval", "because")]
        rows += [("kept" if d.kept else "dropped", d.name, *cells(d.effect), d.reason) for d in self.decisions]
        noise = f"two copies of the original differ by {self.noise:.1%}"
        return "\n".join([f"{gain}; {noise}", *(text_table(rows, right=(2,)) if self.decisions else [])])


def tune(
    model: nn.Module,
    pipeline: Pipeline,
    inputs: OneInput | Sequence[OneInput],
    *,
    per: Part = "pass",
    rounds: int = 30,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress | None = None,
) -> Tuning:
    """Keep only those passes of a pipeline, or those rewrites, whose measured benefit exceeds the noise.

    From the last to the first, each is left out, and the model is measured with and without it, beside all that is
    kept; it stays only if the median of the ratio exceeds the noise, and its whole interval is above 1. So what only
    makes way for another pass is kept with that one, and of two that bring the same, one is. In the end all that is
    kept has to make the model faster than the original, or nothing is kept. Measured is as `bench` does. The model
    stays as it is.

    Args:
        model: a graph module, or a model that ``torch.fx.symbolic_trace`` can trace; in its present mode.
        pipeline: a pass, a composition, or the text of a pipeline.
        inputs: as for `verify`. Of several, one measurement is a call on each.
        per: what is kept or dropped as one: each "pass", or each "site" that one rewrites. Sites of one pass with one
            name are one.
        rounds: how often each is measured, 8 times at least.
        seed: of the order within rounds.
        clock: returns seconds.
        progress: is told how many comparisons of how many are done.

    Raises:
        PreconditionError: The model cannot be traced or refuses the inputs, or an argument makes no sense.
        PassError: A pass fails.

    >>> import torch
    >>> from fxopt_core import LintAndRecompile
    >>> print(tune(torch.nn.ReLU(), LintAndRecompile(), torch.ones(3), rounds=8))
    nothing helps on this model and machine: leave it as it is; two copies of the original differ by ...%
             pass                time without  interval  because
    dropped  lint-and-recompile             -  -         it changes nothing in this model
    """
    sampler = Sampler(inputs, rounds=rounds, seed=seed, clock=clock)
    graph_module, transformation = as_graph_module(model, "tune"), as_transformation(pipeline, "tune")
    tuner = _Tuner(Variants(graph_module, transformation), sampler, per, progress)
    return tuner.tuned(transformation)


class _Tuner:
    """One tuning."""

    def __init__(self, variants: Variants, sampler: Sampler, per: Part, progress: Progress | None) -> None:
        self._variants, self._sampler, self._per = variants, sampler, per
        self._parts = variants.parts(per)
        self._progress = progress
        self._done = 0

    def tuned(self, transformation: Transformation) -> Tuning:
        """Measure, and decide."""
        original = self._variants.original()
        one, other = self._sampler.measure(original, self._variants.original())
        noise = noise_of(Ratio.of(one, other))
        self._tell()
        idle = self._idle(transformation)
        decisions, whole = self._decide(noise, [decision.part for decision in idle])
        speedup = None
        if any(decision.kept for decision in decisions):
            before, after = self._sampler.measure(original, whole)
            speedup = Ratio.of(before, after)
            if speedup.against(noise) != "faster":
                decisions, speedup = [_without_gain(decision, speedup) for decision in decisions], None
        self._tell()
        decisions = [*idle, *reversed(decisions)]
        decisions.sort(key=lambda decision: decision.part.index or 0)
        kept = _kept_passes(transformation, decisions)
        return Tuning(kept, tuple(decisions), speedup, noise, transformation)

    def _decide(self, noise: float, idle: Sequence[RewriteStep]) -> tuple[list[Decision], GraphModule]:
        """Return the decisions on all parts, last first, and what is kept of the model."""
        decisions: list[Decision] = []
        left_out = [*idle]  # they might have something to do without another one
        whole = self._variants.without(left_out)
        for part in reversed(self._parts):
            try:
                without = self._variants.without([*left_out, part])
            except PassError as error:
                decisions.append(Decision(part, True, f"`{error.pass_name}` fails without it"))
            else:
                effect = Ratio.of(*self._sampler.measure(without, whole))
                verdict = effect.against(noise)
                decisions.append(Decision(part, verdict == "faster", _REASONS[verdict], effect))
                if verdict != "faster":
                    left_out.append(part)
                    whole = without
            self._tell()
        return decisions, whole

    def _idle(self, transformation: Transformation) -> list[Decision]:
        """Return the decisions on passes that change nothing."""
        members = leaves(transformation)
        busy = {_place(part, members) for part in self._parts}
        idle = [RewriteStep(None, each.name, place) for place, each in enumerate(members) if place not in busy]
        return [Decision(part, False, "it changes nothing in this model") for part in idle]

    def _tell(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, len(self._parts) + 2)


_REASONS = {
    "faster": "it makes the model faster",
    "slower": "it makes the model slower",
    "within noise": "no benefit beyond the noise",
}


def _without_gain(decision: Decision, speedup: Ratio) -> Decision:
    if not decision.kept:
        return decision
    reason = f"all that was kept is no faster than the original ({speedup})"
    return Decision(decision.part, False, reason, decision.effect)


def _place(part: RewriteStep, members: Sequence[Transformation]) -> int | None:
    """Return the position of the pass of a part; a pass that is no composition is its own only member."""
    return 0 if len(members) == 1 else part.index


def _kept_passes(transformation: Transformation, decisions: Sequence[Decision]) -> Transformation:
    members = leaves(transformation)
    kept = {_place(decision.part, members) for decision in decisions if decision.kept}
    return compose(*(member for place, member in enumerate(members) if place in kept))
