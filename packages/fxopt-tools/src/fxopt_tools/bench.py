"""`bench`: how much a pipeline, each of its passes, or each of its rewrites speeds up a model on this machine.

Models are compared in rounds, each of which runs all of them in a random order; `fxopt_tools.speed` describes how
times of the same rounds are compared.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn
from torch.fx import GraphModule

from fxopt_core import FxoptError, PreconditionError, faithful_copy, instrumented, text_table
from fxopt_tools.inputs import Inputs, OneInput, copied, read_inputs
from fxopt_tools.rewrite_steps import BisectLimit, LeaveOut, RewriteStep
from fxopt_tools.speed import CONFIDENCE, FEWEST_ROUNDS, SHORTEST, Ratio, Times, doubt, noise_of, share_since_now
from fxopt_tools.subjects import Pipeline, as_graph_module, as_transformation
from fxopt_tools.verification.verify import verify

# Calls before anything is measured: fast paths such as packed weights may start only at the second call.
_WARM_UP = 3
# A coarse clock may measure no time at all for short calls, which would ask for billions of repetitions.
_MOST_CALLS = 1000


@dataclass(frozen=True)
class Contribution:
    """How much one pass or one rewrite contributes to the whole.

    Attributes:
        part: the pass or the rewrite.
        effect: how many times longer the model takes without it.
    """

    part: RewriteStep
    effect: Ratio


@dataclass(frozen=True)
class Benchmark:
    """The result of `bench`.

    Attributes:
        original: times of the original model.
        transformed: times of the transformed model.
        speedup: how many times longer the original takes.
        noise: how far from 1 the ratio of two copies of the original was, in the same run.
        contributions: the contribution of each pass or rewrite, in order; empty unless requested.
        doubt: why these numbers cannot be trusted, such as other load on the machine; None if they can.
    """

    original: Times
    transformed: Times
    speedup: Ratio
    noise: float
    contributions: tuple[Contribution, ...] = ()
    doubt: str | None = None

    @property
    def verdict(self) -> Literal["faster", "slower", "within noise"]:
        """How the transformed model compares."""
        return "within noise" if self.doubt else self.speedup.against(self.noise)

    def __str__(self) -> str:
        """Return times, speed-up and a table of contributions."""
        lines = [f"original: {self.original}", f"transformed: {self.transformed}"]
        if self.doubt:
            return "\n".join([*lines, no_ratio(self.doubt)])
        noise = f"two copies of the original differ by {self.noise:.1%}"
        lines.append(f"speed-up: {self.speedup}, {self.verdict}; {noise}")
        if self.contributions:
            rows = [("left out", "time without", "interval", "so it makes the model")]
            rows += [
                (each.part.name, *cells(each.effect), each.effect.against(self.noise)) for each in self.contributions
            ]
            lines += ["", *text_table(rows, right=(1,))]
        return "\n".join(lines)


def no_ratio(doubt: str) -> str:
    """Return the text that replaces a ratio.

    >>> no_ratio("4 threads share 2 processors")
    'no ratio: 4 threads share 2 processors; measure again on a quiet machine, with a thread for each processor'
    """
    return f"no ratio: {doubt}; measure again on a quiet machine, with a thread for each processor"


def cells(ratio: Ratio | None) -> tuple[str, str]:
    """Return the median and the interval as cells of a table."""
    return ("-", "-") if ratio is None else (f"x {ratio.median:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}")


def bench(
    model: nn.Module,
    pipeline: Pipeline,
    inputs: OneInput | Sequence[OneInput],
    *,
    per: Literal["pipeline", "pass", "site"] = "pipeline",
    rounds: int = 30,
    clock: Callable[[], float] = time.perf_counter,
) -> Benchmark:
    """Measure how much a pipeline speeds up a model on this machine.

    In each round the original, a second copy of it and the transformed model run in a random order; the two copies show
    how much of a difference is noise. The transformed model is then compared in the same way with variants that lack
    one pass, or one rewrite. Calls run without gradients, on copies of the inputs, and wait for accelerators to finish.
    The model itself is not changed; up to four copies of it are in memory. Nothing is verified: use `verify` for that.

    Args:
        model: a graph module, or a model that ``torch.fx.symbolic_trace`` can trace; it is run in its current mode.
        pipeline: a pass, a composition, or the text of a pipeline.
        inputs: as for `verify`. If there are several, one measurement calls the model on each.
        per: "pass" or "site" to measure each of these, too.
        rounds: how often each is measured, at least 8 times.
        clock: returns seconds.

    Raises:
        PreconditionError: The model cannot be traced or rejects the inputs, or an argument is invalid.
        PassError: A pass fails.

    >>> import torch
    >>> from fxopt_core import LintAndRecompile
    >>> result = bench(torch.nn.ReLU(), LintAndRecompile(), torch.ones(3), rounds=8)
    >>> result.original.median > 0
    True
    """
    if per not in ("pipeline", "pass", "site"):
        raise PreconditionError(f"per is {per!r}, expected 'pipeline', 'pass' or 'site'")
    sampler = Sampler(inputs, rounds=rounds, clock=clock)
    graph_module, transformation = as_graph_module(model, "bench"), as_transformation(pipeline)
    counter = BisectLimit()
    with instrumented(counter):
        whole = transformation(faithful_copy(graph_module))
    steps = [] if per == "pipeline" else counter.steps
    if per == "pass":
        steps = [RewriteStep(None, step.pass_name, step.index) for step in steps]
    # Site steps became one step for each pass if `per` is "pass", so equal ones are counted once.
    parts = list({(step.pass_name, step.index, step.site): step for step in steps}.values())
    original, again, transformed = sampler.measure(faithful_copy(graph_module), faithful_copy(graph_module), whole)
    contributions: list[Contribution] = []
    for part in parts:
        with instrumented(LeaveOut(part)):
            without = transformation(faithful_copy(graph_module))
        # One variant at a time, so that few copies are in memory; `whole` is measured again in the same rounds.
        contributions.append(Contribution(part, Ratio.of(*sampler.measure(without, whole))))
    speedup, noise = Ratio.of(original, transformed), noise_of(Ratio.of(original, again))
    why = doubt([original, again, transformed], noise)
    return Benchmark(original, transformed, speedup, noise, tuple(contributions), why)


@dataclass(frozen=True)
class Candidate:
    """One pipeline of a `Comparison`.

    Attributes:
        name: its name.
        speedup: how many times longer the original takes; None if it cannot be used.
        problem: why it cannot be used: a pass failed, or the result differs; None if it can.
        exact: whether all of its passes preserve the computation.
        sqnr_db: the lowest signal-to-noise ratio of an output; None if it has none.
        times: its times; None if it cannot be used.
    """

    name: str
    speedup: Ratio | None
    problem: str | None
    exact: bool
    sqnr_db: float | None = None
    times: Times | None = None


@dataclass(frozen=True)
class Comparison:
    """The result of `compare_pipelines`.

    Attributes:
        original: times of the original model.
        noise: how far from 1 the ratio of two copies of the original was, in the same run.
        candidates: the pipelines, in the order in which they were given.
    """

    original: Times
    noise: float
    candidates: tuple[Candidate, ...]

    @property
    def doubt(self) -> str | None:
        """Why these numbers cannot be trusted, such as other load on the machine; None if they can."""
        return doubt([self.original, *(each.times for each in self.candidates if each.times)], self.noise)

    @property
    def best(self) -> Candidate | None:
        """The fastest pipeline that is exact; None if none is faster, or if there is a `doubt`."""
        faster: dict[float, Candidate] = {}
        for each in self.candidates:
            if each.exact and each.speedup is not None and each.speedup.against(self.noise) == "faster":
                faster[each.speedup.median] = each
        return None if self.doubt or not faster else faster[max(faster)]

    def __str__(self) -> str:
        """Return a table, and which pipeline to take."""
        rows, why = [("pipeline", "times as fast", "interval", "SQNR dB", "")], self.doubt
        for each in self.candidates:
            ratio, speedup = "-" if each.sqnr_db is None else f"{each.sqnr_db:.0f}", None if why else each.speedup
            verdict = each.problem or ("" if speedup is None else speedup.against(self.noise))
            rows.append((each.name, *cells(speedup), ratio, verdict))
        advice = "leave the model as it is: no exact pipeline makes it faster"
        advice = no_ratio(why) if why else advice if self.best is None else f"take {self.best.name}"
        head = f"original: {self.original}; two copies of it differ by {self.noise:.1%}"
        return "\n".join([head, "", *text_table(rows, right=(1, 3)), "", advice])


def compare_pipelines(
    model: nn.Module,
    pipelines: Mapping[str, Pipeline],
    inputs: OneInput | Sequence[OneInput],
    *,
    rounds: int = 30,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Measure pipelines on one model, all in the same rounds as the original, and verify their results.

    A pipeline that fails, or whose result differs, is listed with its problem and is not measured. The model is not
    changed; a copy for each pipeline is in memory.

    Args:
        model: as for `bench`.
        pipelines: by name.
        inputs: as for `bench`.
        rounds: how often each is measured, at least 8 times.
        clock: returns seconds.

    Raises:
        PreconditionError: The model cannot be traced or rejects the inputs, or an argument is invalid.

    >>> import torch
    >>> from fxopt_core import LintAndRecompile
    >>> found = compare_pipelines(torch.nn.ReLU(), {"nothing": LintAndRecompile()}, torch.ones(3), rounds=8)
    >>> [(each.name, each.problem) for each in found.candidates]
    [('nothing', None)]
    """
    sampler = Sampler(inputs, rounds=rounds, clock=clock)
    original = faithful_copy(as_graph_module(model, "compare_pipelines"))
    ways = {name: as_transformation(each) for name, each in pipelines.items()}
    candidates, usable = list[Candidate](), list[GraphModule]()
    for name, way in ways.items():
        sqnr_db = problem = None
        try:
            made = way(faithful_copy(original))
            verification = verify(original, made, inputs)
            sqnr_db = min((each.sqnr_db for each in verification.outputs if each.sqnr_db is not None), default=None)
            problem = None if verification else f"differs: {verification.problem}"
            usable += [made] if verification else []
        except FxoptError as error:
            problem = str(error).partition("\n")[0]
        candidates.append(Candidate(name, None, problem, way.preserves_computation, sqnr_db))
    first, again, *others = sampler.measure(original, faithful_copy(original), *usable)
    for place, each in enumerate(candidates):
        if each.problem is None:
            times = others.pop(0)
            candidates[place] = replace(each, times=times, speedup=Ratio.of(first, times))
    return Comparison(first, noise_of(Ratio.of(first, again)), tuple(candidates))


class Sampler:
    """Measures modules on inputs, as `bench` does: calling a module means calling it on each of them.

    Short calls are repeated, so that a measurement takes at least ``sample_seconds``.
    """

    def __init__(
        self,
        inputs: OneInput | Sequence[OneInput],
        *,
        rounds: int,
        clock: Callable[[], float] = time.perf_counter,
        sample_seconds: float = 0.005,
    ) -> None:
        if type(rounds) is not int or rounds < FEWEST_ROUNDS:
            raise PreconditionError(
                f"rounds is {rounds!r}, expected a number from {FEWEST_ROUNDS}: fewer cannot give a confidence of "
                f"{CONFIDENCE:.0%}"
            )
        self._inputs = read_inputs(inputs)
        self._rounds, self._clock, self._sample_seconds = rounds, clock, sample_seconds
        self._random = random.Random(0)

    def measure(self, *modules: nn.Module) -> list[Times]:
        """Return the times of modules, measured in the same rounds."""
        warm_up = [self._warm_up(module) for module in modules for _ in range(_WARM_UP)]
        shortest = min((seconds for seconds, _ in warm_up), default=math.inf)
        calls = max(1, min(math.ceil(self._sample_seconds / max(shortest, SHORTEST)), _MOST_CALLS))
        if any(wrote for _, wrote in warm_up):
            calls = 1  # a second call would see what the first one wrote to the inputs
        found: list[list[float]] = [[] for _ in modules]
        order, share = list(range(len(modules))), share_since_now(self._clock)
        for _ in range(self._rounds):
            self._random.shuffle(order)
            for place in order:
                found[place].append(self._sample(modules[place], calls)[0])
        return [Times(tuple(seconds), share()) for seconds in found]

    def _warm_up(self, module: nn.Module) -> tuple[float, bool]:
        try:
            return self._sample(module, 1)
        except PreconditionError:
            raise
        except Exception as error:
            message = f"the model refuses the inputs: {type(error).__name__}: {error}"
            raise PreconditionError(f"{message}. Expected inputs that it can be called with") from error

    def _sample(self, module: nn.Module, calls: int) -> tuple[float, bool]:
        """Return the seconds of one call, and whether it wrote to its inputs, which are copies."""
        copies = [copied(item) for item in self._inputs]
        wait = _wait(module, self._inputs)
        with torch.no_grad():
            wait()
            started = self._clock()
            for _ in range(calls):
                for each in copies:
                    module(*each.inputs.args, **each.inputs.kwargs)
            wait()
            seconds = self._clock() - started
        return seconds / calls, any(each.touched() for each in copies)


def _wait(module: nn.Module, inputs: Sequence[Inputs]) -> Callable[[], object]:
    """Return a function that waits until an accelerator has finished; it does nothing if everything is on the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    tensors = [*module.parameters(), *module.buffers(), *(t for item in inputs for t in item.tensors().values())]
    if accelerator is not None and any(tensor.device.type == accelerator.type for tensor in tensors):
        return torch.accelerator.synchronize
    return lambda: None
