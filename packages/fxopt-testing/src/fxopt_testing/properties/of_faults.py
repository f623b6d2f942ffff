"""What holds if a pass fails half-way."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import nn
from torch.fx import GraphModule

from fxopt_core import Composition, Transformation
from fxopt_testing.faults import inject_faults, some
from fxopt_testing.findings import Flaw
from fxopt_testing.footprints import bits_of, values_of
from fxopt_testing.properties.base import Property
from fxopt_testing.trial import Subject, Trial

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
    if isinstance(transformation, Composition):
        return frozenset().union(*map(_files, transformation.transformations))
    found: set[str] = set()
    for cls in type(transformation).__mro__:
        try:
            file = inspect.getsourcefile(cls)
        except TypeError:
            continue
        if file is not None and "fxopt_core" not in file and Path(file).name != "abc.py":
            found.add(file)
    return frozenset(found)


FAULTS = Property(
    "all-or-nothing",
    "if anything raises on the way, everything is as it was",
    "Let errors pass: core rolls back what raises, and cannot know of what is caught. Change nothing outside of the "
    "graph module that you were given.",
    on_pass=_all_or_nothing,
)
