"""`bench`: what a pipeline, each of its passes, or each of its rewrites brings on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from fxopt_core import PreconditionError
from fxopt_tools.inputs import OneInput
from fxopt_tools.sampling import Ratio, Sampler, Times, noise_of
from fxopt_tools.steps import RewriteStep
from fxopt_tools.subjects import Pipeline, as_graph_module, as_transformation
from fxopt_tools.tables import text_table
from fxopt_tools.variants import Variants

Progress = Callable[[int, int], object]
"""Is told how many comparisons of how many are done."""


@dataclass(frozen=True)
class Contribution:
    """What one pass or one rewrite brings to the whole.

    Attributes:
        part: the pass or the rewrite.
        effect: how many times longer the model takes where it is left out.
    """

    part: RewriteStep
    effect: Ratio

    @property
    def name(self) -> str:
        """Pass and site."""
        return name_of(self.part)


@dataclass(frozen=True)
class Benchmark:
    """What `bench` measured.

    Attributes:
        original: times of the model as it was.
        transformed: times of what the pipeline made of it.
        speedup: how many times longer the original takes.
        noise: how far from 1 the ratio of two copies of the original was, in the same run.
        contributions: what each pass or rewrite brings, in order; empty where that was not asked for.
    """

    original: Times
    transformed: Times
    speedup: Ratio
    noise: float
    contributions: tuple[Contribution, ...] = ()

    @property
    def verdict(self) -> Literal["faster", "slower", "within noise"]:
        """What became of the model."""
        return self.speedup.against(self.noise)

    def __str__(self) -> str:
        """Return times, speed-up and a table of contributions."""
        lines = [
            f"original: {self.original}",
            f"transformed: {self.transformed}",
            f"speed-up: {self.speedup}, {self.verdict}; two copies of the original differ by {self.noise:.1%}",
        ]
        if not self.contributions:
            return "\n".join(lines)
        rows = [("left out", "time without", "interval", "so it makes the model")]
        rows += [(each.name, *cells(each.effect), each.effect.against(self.noise)) for each in self.contributions]
        return "\n".join([*lines, "", *text_table(rows, right=(1,))])


def cells(ratio: Ratio | None) -> tuple[str, str]:
    """Return median and interval for a table."""
    return ("-", "-") if ratio is None else (f"x {ratio.median:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}")


def name_of(part: RewriteStep) -> str:
    """Return the name of a pass, or of a pass and a site."""
    return part.pass_name if part.site is None else f"{part.pass_name} on {part.site}"


def bench(
    model: nn.Module,
    pipeline: Pipeline,
    inputs: OneInput | Sequence[OneInput],
    *,
    per: Literal["pipeline", "pass", "site"] = "pipeline",
    rounds: int = 30,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress | None = None,
) -> Benchmark:
    """Measure what a pipeline brings on a model and inputs, on this machine.

    Model and result take turns, in rounds of an order that is drawn anew, and so does a second copy of the model, which
    shows how much of a difference is noise. The same is then done for the result with and without each pass, or each
    rewrite. Calls run without gradients, on copies of the inputs; work of an accelerator is waited for. The model stays
    as it is; up to four copies of it are held. Nothing is verified: `verify` does that.

    Args:
        model: a graph module, or a model that ``torch.fx.symbolic_trace`` can trace; in its present mode.
        pipeline: a pass, a composition, or the text of a pipeline.
        inputs: as for `verify`. Of several, one measurement is a call on each.
        per: "pass" or "site" to measure each of these, too.
        rounds: how often each is measured, 8 times at least.
        seed: of the order within rounds.
        clock: returns seconds.
        progress: is told how many comparisons of how many are done.

    Raises:
        PreconditionError: The model cannot be traced or refuses the inputs, or an argument makes no sense.
        PassError: A pass fails.

    >>> import torch
    >>> from fxopt_core import LintAndRecompile
    >>> result = bench(torch.nn.ReLU(), LintAndRecompile(), torch.ones(3), rounds=8)
    >>> result.original.median > 0
    True
    """
    if per not in ("pipeline", "pass", "site"):
        raise PreconditionError(f"per is {per!r}, expected 'pipeline', 'pass' or 'site'")
    sampler = Sampler(inputs, rounds=rounds, seed=seed, clock=clock)
    variants = Variants(as_graph_module(model, "bench"), as_transformation(pipeline, "bench"))
    parts = [] if per == "pipeline" else variants.parts(per)
    told = progress or (lambda done, total: None)
    whole = variants.without(())
    original, again, transformed = sampler.measure(variants.original(), variants.original(), whole)
    told(1, 1 + len(parts))
    contributions: list[Contribution] = []
    for done, part in enumerate(parts, start=2):
        without, with_it = sampler.measure(variants.without([part]), whole)
        contributions.append(Contribution(part, Ratio.of(without, with_it)))
        told(done, 1 + len(parts))
    speedup, noise = Ratio.of(original, transformed), noise_of(Ratio.of(original, again))
    return Benchmark(original, transformed, speedup, noise, tuple(contributions))
