"""The kit finds what is wrong with passes, by the right property, and finds nothing in passes that are right."""

from __future__ import annotations

from functools import cache

import defects_of_computation as computation
import defects_of_passes as passes
import defects_of_results as results
import pytest

from fxopt_core import Transformation
from fxopt_testing import ConformanceReport, check_transformation, model_case, zoo
from fxopt_testing.cases import ModelCase

NAMES = (
    "spare parts[graph]",
    "nested graphs[graph]",
    "attention[modules]",
    "attention[export]",
    "attention[modules-bfloat16]",
    "attention[modules-meta]",
    "pair[functions]",
    "pair without bias[export-float64]",
    "keywords[modules]",
    "called twice[modules]",
    "tied[modules]",
    "written between[modules]",
    "hooked[modules]",
    "frozen[modules]",
    "subclassed[modules]",
    "parametrized[modules]",
    "sizes[modules]",
    "hub[modules]",
    "unused result[modules]",
    "convolution[modules]",
    "convolution[modules-train]",
    "arithmetic[modules]",
    "rounded quotients[modules]",
    "in-place operations[modules]",
    "writes its input[modules]",
    "repeated[modules]",
    "by size[modules]",
    "structured[modules]",
    "passed through[modules]",
    "products[modules]",
    "many products[modules]",
    "generated 0[modules]",
)
"""Models on which each of the defects shows; the passes that are right are tried on the whole zoo."""

RIGHT = (results.Renewing, results.Padding, passes.Commuting)

WRONG: dict[type[Transformation], tuple[str, ...]] = {
    results.WritesCaller: ("caller-untouched",),
    results.SetsFlagOfCaller: ("caller-untouched",),
    results.ForgetsTies: ("ties-kept",),
    results.KeepsDeadModules: ("no-leftovers",),
    results.Unfreezes: ("flags-kept",),
    results.TrainsAgain: ("flags-kept",),
    results.ChangesDtype: ("dtypes-kept",),
    results.DropsHooks: ("hooks-kept",),
    results.LosesUnusedKeys: ("keys-kept",),
    results.MakesPersistent: ("keys-kept",),
    results.LosesMetadata: ("traces-kept",),
    results.LosesShapes: ("traces-kept",),
    results.MarksOnNodes: ("survives-deepcopy",),
    results.SharesBetweenResults: ("results-independent",),
    results.DrawsRandomNumbers: ("process-untouched",),
    results.UndoesInexactly: ("exact-undo",),
    results.KeepsMarks: ("exact-undo",),
    results.UndoesNothing: ("exact-undo",),
    results.WrongPiece: ("exact-undo", "checkpoints-load"),
    results.RefusesBadly: ("refusals-explained",),
    results.RefusesForSecrets: ("reasons-declared",),
    computation.ClaimsWrongly: ("same-outputs",),
    computation.ForgetsSharedModule: ("ties-kept", "same-outputs"),
    computation.TakesSubclasses: ("same-outputs",),
    computation.TakesNoKeywords: ("runs",),
    computation.IgnoresRounding: ("same-outputs",),
    computation.WrongOnAtenAlone: ("same-outputs",),
    computation.FoldsInTrainMode: ("no-leftovers", "train-mode"),
    computation.SharesAcrossWrites: ("same-outputs",),
    computation.RemovesWrites: ("same-outputs", "same-effects"),
    computation.WritesCopies: ("same-effects",),
    computation.ReturnsViews: ("same-outputs", "same-effects"),
    computation.Detaches: ("same-gradients",),
    computation.BakesBatchSize: ("other-inputs",),
    computation.BreaksOnEmptyBatch: ("other-inputs",),
    computation.ExpectsContiguous: ("other-inputs",),
    computation.RenamesArguments: ("interface-kept",),
    computation.LosesDefaults: ("interface-kept",),
    computation.AddsEachTime: ("idempotent",),
    passes.IgnoresOption: ("options-honoured",),
    passes.DropsOption: ("options-honoured",),
    passes.SignsWithoutOption: ("options-honoured",),
    passes.SignsByIdentity: ("signature-stable",),
    passes.SignsByHash: ("signature-stable",),
    passes.SignsByRuns: ("signature-stable",),
    passes.NeedsPosition: ("constructible",),
    passes.TakesAnything: ("constructible",),
    passes.NamedBadly: ("named",),
    passes.ReturnsNothing: ("returns-a-graph-module",),
    passes.ReturnsGraph: ("returns-a-graph-module",),
    passes.InsertsBehindUse: ("well-formed",),
    passes.CallsWhatIsNotThere: ("well-formed",),
    passes.NeverCompiles: ("well-formed",),
    passes.SwallowsErrors: ("all-or-nothing",),
    passes.LeavesGradMode: ("all-or-nothing",),
    passes.SwitchesGradientsOff: ("process-untouched",),
    passes.WalksTheGraphEachTime: ("linear-cost",),
    passes.WalksUsersEachTime: ("linear-cost",),
    passes.CountsRuns: ("deterministic",),
    passes.Rolls: ("deterministic",),
    passes.OrdersByHash: ("deterministic",),
    passes.CapturesTensor: ("survives-pickling",),
}
"""Passes to the property that is told first, and the one that says what is wrong, where that is another one."""


@cache
def models() -> tuple[ModelCase, ...]:
    return tuple(map(model_case, NAMES))


@cache
def report_of(cls: type[Transformation]) -> ConformanceReport:
    made = cls(2.0) if cls is passes.NeedsPosition else cls()
    return check_transformation(made, models=models(), raises=False)


@pytest.mark.parametrize("cls", RIGHT, ids=lambda cls: cls.__name__)
def test_passes_that_are_right_pass(cls: type[Transformation]) -> None:
    report = check_transformation(cls(), models=zoo())
    assert report
    assert {each.property for each in report.findings} <= {"checkpoints-load"}, report


@pytest.mark.parametrize("cls", WRONG, ids=lambda cls: cls.__name__)
def test_defects_are_found(cls: type[Transformation]) -> None:
    report = report_of(cls)
    assert report.primary is not None, report
    assert report.primary.property == WRONG[cls][0], report
    assert set(WRONG[cls]) <= {each.property for each in report.errors}, report
    assert report.primary.advice
    assert f"properties=['{report.primary.property}']" in report.primary.reproduction


def test_a_pass_that_finds_nothing_is_told_so() -> None:
    report = report_of(passes.FindsNothing)
    assert report
    assert "finds-sites" in {each.property for each in report.findings}
    assert "changed none of" in str(report)


def test_every_property_is_proved_to_find_something() -> None:
    from fxopt_testing import PROPERTIES

    proved = {name for names in WRONG.values() for name in names}
    assert {each.name for each in PROPERTIES} - proved == {"finds-sites"}
