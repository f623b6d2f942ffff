"""A property that shipped passes keep besides those of the kit: what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

from step_counts import Steps
from torch import nn
from torch.fx import GraphModule

from fxopt_core import Composition, Transformation
from fxopt_testing.cases import Captured, ModelCase
from fxopt_testing.findings import Flaw, Property
from fxopt_testing.models import linear, norm, plain
from fxopt_testing.trial import Subject, Trial

GROWING: dict[str, Callable[[int], nn.Module]] = {
    "hub": linear.Hub,
    "blocks": lambda times: nn.Sequential(*(linear.Block() for _ in range(times))),
    "convolutions": lambda times: nn.Sequential(*(norm.Convolution() for _ in range(times))),
    "products": plain.Products,
}
"""By the name of a case of the zoo: what makes it with so many times as many sites."""

_TIMES = (4, 8, 16)
_GROWTH = 2.5
"""Steps from 8 to 16 times over those from 4 to 8 times: 2 if linear, 2.2 with a sort, 4 if quadratic."""


def _if_growing(subject: Subject, trial: Trial | None) -> str | None:
    return None if any(case.name in GROWING for case in subject.cases) else "no model grows"


def _linear(subject: Subject) -> Iterator[Flaw]:
    for case in subject.cases:
        if case.name not in GROWING or case.form != "modules" or case.training:
            continue
        _steps(subject, case, 1)  # so that nothing below looks up what a process looks up once
        steps = [_steps(subject, case, times) for times in _TIMES]
        less, more = steps[1] - steps[0], steps[2] - steps[1]
        if less > 0 and more > _GROWTH * less:
            found = f"{steps[0]}, {steps[1]} and {steps[2]} steps for {', '.join(map(str, _TIMES))} times {case.id}"
            yield Flaw(f"{found}: twice as many sites, {more / less:.1f} times the steps", "2 times")


def grown(case: ModelCase, times: int) -> Captured:
    """Return a case of the zoo with so many times as many sites."""
    return case.variant(make=partial(GROWING[case.name], times)).capture()


def _steps(subject: Subject, case: ModelCase, times: int) -> int:
    """Return how many steps the pass's own code takes, what core does around it left out."""
    transformation, steps = subject.transformation, Steps()
    graph_module = grown(case, times).graph_module
    transform = type(transformation).transform

    def counted(self: Transformation, graph_module: GraphModule) -> GraphModule:
        with steps.counting():
            return transform(self, graph_module)

    if isinstance(transformation, Composition):
        with steps.counting():
            transformation(graph_module, lint_and_recompile=False)
        return steps.count
    with mock.patch.object(type(transformation), "transform", counted):
        transformation(graph_module, lint_and_recompile=False)
    return steps.count


COST = Property(
    "linear-cost",
    "the work grows as the number of nodes does, also where one value has many users",
    "Walk the graph once, and look up by dictionaries: no walk over all nodes, or over all users of a value, for each "
    "site. `GraphIndex` has what most passes look for.",
    on_pass=_linear,
    applies=_if_growing,
)
