"""Properties that shipped passes keep besides those of the kit: costs, failures, and other processes."""

from __future__ import annotations

import sys
from abc import ABC
from collections.abc import Callable, Collection, Iterator
from functools import partial
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any
from unittest import mock

from other_process import elsewhere
from step_counts import Steps, profiler
from torch import nn
from torch.fx import GraphModule

from fxopt_core import Composition, Transformation
from fxopt_testing.cases import Captured, ModelCase
from fxopt_testing.findings import Flaw, Property
from fxopt_testing.forms import TRACED
from fxopt_testing.models import is_of_the_zoo, linear, norm, plain
from fxopt_testing.pictures import bits_of, changes, modes_of_process, picture, state_of
from fxopt_testing.trial import Subject, Trial, members_of

GROWING: dict[str, Callable[[int], nn.Module]] = {
    "hub": linear.Hub,
    "blocks": linear.Blocks,
    "convolutions": norm.Convolutions,
    "products": plain.Products,
}
"""By the name of a case of the zoo: what makes it with so many times as many sites."""

_TIMES = (6, 12, 24)
_GROWTH = 2.5
"""Steps from 12 to 24 times over those from 6 to 12 times: 2 if linear, 2.2 with a sort, 4 if quadratic."""


def _if_growing(subject: Subject, trial: Trial | None) -> str | None:
    return None if any(case.name in GROWING for case in subject.cases) else "no model grows"


def _linear(subject: Subject) -> Iterator[Flaw]:
    forms = TRACED if subject.thorough else TRACED[:1]
    for case in subject.cases:
        if case.name not in GROWING or case.form not in forms or case.training:
            continue
        steps = [_steps(subject, case, times * (2 if subject.thorough else 1)) for times in _TIMES]
        less, more = steps[1] - steps[0], steps[2] - steps[1]
        if less > 0 and more > _GROWTH * less:
            found = f"{steps[0]}, {steps[1]} and {steps[2]} steps for {', '.join(map(str, _TIMES))} times the sites"
            yield Flaw(f"{found}: twice as many sites, {more / less:.1f} times the steps", "2 times", case=case.id)


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

_FAULTS, _MODELS = 12, 3


def _all_or_nothing(subject: Subject) -> Iterator[Flaw]:
    trials = [trial for trial in subject.changed if trial.case.device == "cpu" and not trial.case.real]
    plain = [trial for trial in trials if not trial.case.training and trial.case.form == "modules"]
    for trial in (plain or trials)[: 3 * _MODELS if subject.thorough else _MODELS]:
        for line in _traces(subject, trial):
            yield Flaw(line, "an error, and everything as it was; or the whole rewrite", case=trial.case.id)
            break


def _traces(subject: Subject, trial: Trial) -> Iterator[str]:
    """Yield what a pass leaves behind that fails at some of the calls that its own code makes."""
    first, files = trial.case.example(), _files(subject.transformation)
    known = [bits_of(module(*first.args, **first.kwargs)) for module in (trial.fresh(), trial.transformed())]
    for events in (("call", "c_call"), ("return", "c_return")):  # before a call does anything, and after it has
        count = _run(subject.transformation, trial.case.capture().graph_module, files, events)
        for number in range(1, count + 1, max(1, count // (_FAULTS * (4 if subject.thorough else 1)))):
            captured = trial.case.capture()
            graph_module, former = captured.graph_module, state_of(captured.model) | modes_of_process()
            before = picture(graph_module, marks=True)
            result: GraphModule | None = None
            try:
                _run(subject.transformation, graph_module, files, events, number)
                result = graph_module
            except Exception as error:
                what = f"an error at call {number} of the pass ({error})"
            found = changes(former, state_of(captured.model) | modes_of_process(), limit=1)
            if result is None:
                found += changes(before, picture(graph_module, marks=True), limit=1)
            elif picture(result) not in (trial.before, trial.after):
                inputs = trial.case.example()
                if not subject.transformation.preserves_computation:
                    yield "the pass swallowed an error, and its result is neither what was nor what would have been"
                elif bits_of(result(*inputs.args, **inputs.kwargs)) not in known:
                    yield "the pass swallowed an error, and its result computes something else"
                what = "an error that the pass swallowed"
            for name, now, was in found[:1]:
                trial.case.forget()
                yield f"after {what}, {name} is {now}, was {was}"


class _InjectedError(Exception):
    """Is raised at a call."""


def _run(
    transformation: Transformation,
    graph_module: GraphModule,
    files: Collection[str],
    events: Collection[str],
    fail_at: int | None = None,
) -> int:
    """Apply a pass, and raise at one of the calls that code of these files makes; return how many there are.

    What ends or begins something, such as a ``with`` block, never fails: nobody could repair that.
    """
    count = 0

    def profile(frame: FrameType, event: str, built_in: Any) -> None:
        nonlocal count
        if event not in events or (not event.startswith("c_") and frame.f_code.co_flags & CO_GENERATOR):
            return  # generators are resumed and closed, too, where nobody sees an error
        caller, name = (frame, built_in.__name__) if event.startswith("c_") else (frame.f_back, frame.f_code.co_name)
        if caller is not None and caller.f_code.co_filename in files and name not in ("__enter__", "__exit__"):
            count += 1
            if count == fail_at:
                sys.setprofile(None)
                raise _InjectedError(f"injected at `{name}`")

    former, hook = profiler(), sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None  # what fails where nothing can be raised is survived
    sys.setprofile(profile)
    try:
        transformation(graph_module)
    finally:
        sys.setprofile(former)
        sys.unraisablehook = hook
    return count


def _files(transformation: Transformation) -> frozenset[str]:
    """Return the source files of a pass."""
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

_ASKED = 3
"""On how many models other processes are asked: those with the most changes, where an order of hashes shows."""


def _same_elsewhere(subject: Subject) -> Iterator[Flaw]:
    if not subject.importable:
        return
    asked = [trial for trial in subject.most_changed[:_ASKED] if is_of_the_zoo(trial.case)]
    answer = elsewhere(subject.transformation, [trial.case.id for trial in asked])
    if answer.error is not None:
        yield Flaw(f"in another process, the pass raises {answer.error:.300}", "what it does in this one")
        return
    signature = subject.transformation.signature
    if answer.signature != signature:
        yield Flaw(f"in another process the signature is {answer.signature:.200}", f"{signature}, as in this one")
    for trial in asked:
        mine = {name: repr(value) for name, value in trial.after.items()}
        for name, now, was in changes(mine, dict(answer.pictures[trial.case.id]), limit=1):
            yield Flaw(f"in another process, with other hashes, {name} is {now}", f"{was}, as in this one")


ELSEWHERE = Property(
    "same-elsewhere",
    "in another process, with other hashes, an equal pass has the same signature and does the same",
    "Order what is gathered by the graph, and sign no hash.",
    on_pass=_same_elsewhere,
)

HOUSE = (FAULTS, COST, ELSEWHERE)
