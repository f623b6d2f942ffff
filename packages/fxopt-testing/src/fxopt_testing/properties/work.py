"""Properties of the work of a pass: it grows as the graph does, and a failure leaves no trace of it."""

from __future__ import annotations

import sys
from abc import ABC
from collections.abc import Iterator, Sequence
from unittest import mock

from torch import nn
from torch.fx import GraphModule

from fxopt_core import Composition, Transformation
from fxopt_testing.cases import ModelCase
from fxopt_testing.faults import inject_faults, some
from fxopt_testing.findings import Flaw, Property
from fxopt_testing.footprints import bits_of, values_of
from fxopt_testing.forms import TRACED
from fxopt_testing.steps import Steps
from fxopt_testing.trial import Subject, Trial, members_of

_TIMES = (6, 12, 24)
_GROWTH = 2.5
"""Steps from 12 to 24 times over those from 6 to 12 times: 2 if linear, 2.2 with a sort, 4 if quadratic."""


def _if_growing(subject: Subject, trial: Trial | None) -> str | None:
    return None if any(case.grow for case in subject.cases) else "no model says how it grows (ModelCase(grow=...))"


def _linear(subject: Subject) -> Iterator[Flaw]:
    forms = TRACED if subject.thorough else TRACED[:1]
    for case in subject.cases:
        if case.grow is None or case.form not in forms or case.training:
            continue
        steps = [_steps(subject, case, times * (2 if subject.thorough else 1)) for times in _TIMES]
        less, more = steps[1] - steps[0], steps[2] - steps[1]
        if less > 0 and more > _GROWTH * less:
            found = f"{steps[0]}, {steps[1]} and {steps[2]} steps for {', '.join(map(str, _TIMES))} times the sites"
            yield Flaw(f"{found}: twice as many sites, {more / less:.1f} times the steps", "2 times", case=case.id)


def _steps(subject: Subject, case: ModelCase, times: int) -> int:
    """Return how many steps the pass's own code takes, what core does around it left out."""
    transformation, steps = subject.transformation, Steps()
    graph_module = case.grown(times).graph_module
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

_FAULTS, _MODELS = 12, 3


def _all_or_nothing(subject: Subject) -> Iterator[Flaw]:
    trials = [trial for trial in subject.changed if trial.case.device == "cpu" and not trial.case.real]
    plain = [trial for trial in trials if not trial.case.training and trial.case.form == "modules"]
    for trial in (plain or trials)[: 3 * _MODELS if subject.thorough else _MODELS]:
        for line in _traces(subject, trial):
            yield Flaw(line, "an error, and everything as it was; or the whole rewrite", case=trial.case.id)
            break


def _traces(subject: Subject, trial: Trial) -> Iterator[str]:
    def make() -> Sequence[nn.Module]:
        captured = trial.case.capture()
        return captured.graph_module, captured.model

    def survived(graph_module: GraphModule) -> Iterator[str]:
        """Yield what is wrong with a result of a run that swallowed its fault."""
        rows, inputs = values_of(graph_module), trial.case.example()
        if rows in (values_of(trial.source), values_of(trial.done)):
            return
        if not subject.transformation.preserves_computation:
            yield "the pass swallowed an error, and its result is neither what was nor what would have been"
        elif bits_of(graph_module(*inputs.args, **inputs.kwargs)) not in known:
            yield "the pass swallowed an error, and its result computes something else"

    first = trial.case.example()
    known = [bits_of(module(*first.args, **first.kwargs)) for module in (trial.fresh(), trial.transformed())]
    given = trial.case.example()
    for moment in ("before", "after"):
        report = inject_faults(
            make,
            subject.transformation,
            given.args,
            given.kwargs,
            choose=some(_FAULTS * (4 if subject.thorough else 1)),
            moment="before" if moment == "before" else "after",
            files=_files(subject.transformation),
            survived=survived,
        )
        yield from report.traces


def _files(transformation: Transformation) -> frozenset[str]:
    """Return the source files of a pass: calls made there fail, too."""
    classes = (cls for each in members_of(transformation) for cls in type(each).__mro__ if cls is not ABC)
    files = {getattr(sys.modules.get(cls.__module__), "__file__", None) for cls in classes}
    return frozenset(file for file in files if file is not None and "fxopt_core" not in file)


FAULTS = Property(
    "all-or-nothing",
    "if anything raises on the way, everything is as it was",
    "Let errors pass: core rolls back what raises, and cannot know of what is caught. Change nothing outside of the "
    "graph module that you were given.",
    on_pass=_all_or_nothing,
)
