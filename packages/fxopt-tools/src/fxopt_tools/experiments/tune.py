"""`tune`: keep only what makes a model faster on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.fx import GraphModule

from fxopt_core import PassError, Transformation, compose, instrumented
from fxopt_core.passes.runnable import leaves
from fxopt_core.text import text_table
from fxopt_rewrite.speed import Ratio, noise_of
from fxopt_tools.experiments.bench import Progress, Sampler, cells
from fxopt_tools.experiments.rewrite_steps import LeaveOut, Part, RewriteStep, Variants
from fxopt_tools.inputs import OneInput
from fxopt_tools.subjects import Pipeline, as_graph_module, as_transformation

_REASONS = {
    "faster": "it makes the model faster",
    "slower": "it makes the model slower",
    "within noise": "no benefit beyond the noise",
}


@dataclass(frozen=True)
class Decision:
    """Whether `tune` keeps one pass or one rewrite, and why.

    Attributes:
        part: the pass or the rewrite.
        kept: whether it is kept.
        reason: why, in a few words.
        effect: how many times longer the model took without it, with everything else that was kept at that point; None
            if not measured.
    """

    part: RewriteStep
    kept: bool
    reason: str
    effect: Ratio | None = None

    @property
    def name(self) -> str:
        """Pass and site."""
        return self.part.name


@dataclass(frozen=True)
class Tuning:
    """What `tune` kept and dropped; true if anything helps.

    Attributes:
        transformation: the passes of which anything was kept, in order.
        decisions: a decision for each pass or rewrite, in order.
        speedup: how many times longer the original takes than the model with what was kept; None if nothing was.
        noise: how far from 1 the ratio of two copies of the original was.
    """

    transformation: Transformation
    decisions: tuple[Decision, ...]
    speedup: Ratio | None
    noise: float
    _pipeline: Transformation

    @property
    def kept(self) -> tuple[Decision, ...]:
        """The decisions to keep."""
        return tuple(each for each in self.decisions if each.kept)

    @property
    def dropped(self) -> tuple[Decision, ...]:
        """The decisions to drop."""
        return tuple(each for each in self.decisions if not each.kept)

    def apply(self, graph_module: GraphModule) -> GraphModule:
        """Run the pipeline on a graph module, in place, without what was dropped."""
        with instrumented(LeaveOut(*(decision.part for decision in self.dropped))):
            return self._pipeline(graph_module)

    def __bool__(self) -> bool:
        """Return whether anything is kept."""
        return bool(self.kept)

    def __str__(self) -> str:
        """Return the speed-up, and a table of what was kept and dropped."""
        none = "nothing helps on this model and machine: leave it as it is"
        kept = f"kept {len(self.kept)} of {len(self.decisions)}: speed-up {self.speedup}"
        gain = none if self.speedup is None else kept
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
    """Keep only the passes of a pipeline, or the rewrites, whose measured benefit exceeds the noise.

    Going from the last to the first, each is left out, and the model is measured with and without it, with everything
    else that is still kept. It stays only if the median of the ratio exceeds the noise and its whole interval is above
    1. So a pass that merely enables another is kept with that one, and of two with the same benefit one is kept.
    Finally all that is kept must make the model faster than the original, or nothing is kept. Measuring works as in
    `bench`. The model itself is not changed.

    Args:
        model, pipeline, inputs, rounds, seed, clock, progress: as for `bench`.
        per: what to decide on: each "pass", or each "site" that a pass rewrites. Sites of one pass that share a name
            count as one.

    Raises:
        PreconditionError: The model cannot be traced or rejects the inputs, or an argument is invalid.
        PassError: A pass fails.

    >>> import torch
    >>> from fxopt_core import LintAndRecompile
    >>> print(tune(torch.nn.ReLU(), LintAndRecompile(), torch.ones(3), rounds=8))
    nothing helps on this model and machine: leave it as it is; two copies of the original differ by ...%
             pass                time without  interval  because
    dropped  lint-and-recompile             -  -         it changes nothing in this model
    """
    sampler = Sampler(inputs, rounds=rounds, seed=seed, clock=clock)
    variants = Variants(as_graph_module(model, "tune"), as_transformation(pipeline, "tune"))
    return _Tuner(variants, sampler, per, progress).tuned()


class _Tuner:
    """One tuning."""

    def __init__(self, variants: Variants, sampler: Sampler, per: Part, progress: Progress | None) -> None:
        self._variants, self._sampler, self._progress = variants, sampler, progress
        self._members = [leaf for leaf in leaves(variants.transformation) if isinstance(leaf, Transformation)]
        self._parts = variants.parts(per)
        self._done = 0

    def tuned(self) -> Tuning:
        """Measure and decide."""
        original = self._variants.original()
        noise = noise_of(self._ratio(original, self._variants.original()))
        self._advance()
        idle = self._idle()
        decisions, whole = self._decide(noise, [decision.part for decision in idle])
        speedup = self._ratio(original, whole) if any(decision.kept for decision in decisions) else None
        if speedup is not None and speedup.against(noise) != "faster":
            reason = f"all that was kept is no faster than the original ({speedup})"
            decisions = [replace(each, kept=False, reason=reason) if each.kept else each for each in decisions]
            speedup = None
        self._advance()
        decisions = sorted([*idle, *reversed(decisions)], key=lambda decision: decision.part.index or 0)
        kept = {self._position(decision.part) for decision in decisions if decision.kept}
        passes = compose(*(member for position, member in enumerate(self._members) if position in kept))
        return Tuning(passes, tuple(decisions), speedup, noise, self._variants.transformation)

    def _decide(self, noise: float, idle: Sequence[RewriteStep]) -> tuple[list[Decision], GraphModule]:
        """Return the decisions on all parts, last first, and the model with what is kept."""
        decisions: list[Decision] = []
        left_out = [*idle]  # a pass that is idle now might not be without another one
        whole = self._variants.without(left_out)
        for part in reversed(self._parts):
            try:
                without = self._variants.without([*left_out, part])
            except PassError as error:
                decisions.append(Decision(part, True, f"`{error.pass_name}` fails without it"))
            else:
                effect = self._ratio(without, whole)
                verdict = effect.against(noise)
                decisions.append(Decision(part, verdict == "faster", _REASONS[verdict], effect))
                if verdict != "faster":
                    left_out, whole = [*left_out, part], without
            self._advance()
        return decisions, whole

    def _idle(self) -> list[Decision]:
        """Return the decisions on passes that change nothing."""
        busy = {self._position(part) for part in self._parts}
        idle = [RewriteStep(None, each.name, place) for place, each in enumerate(self._members) if place not in busy]
        return [Decision(part, False, "it changes nothing in this model") for part in idle]

    def _position(self, part: RewriteStep) -> int | None:
        """Return the position of a part's pass; a pass outside a composition is its own only member."""
        return 0 if len(self._members) == 1 else part.index

    def _ratio(self, slow: GraphModule, fast: GraphModule) -> Ratio:
        return Ratio.of(*self._sampler.measure(slow, fast))

    def _advance(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, len(self._parts) + 2)
