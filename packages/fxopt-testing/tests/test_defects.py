"""The kit finds what is wrong with passes, by the right property."""

from __future__ import annotations

from functools import cache

import defects_of_checkpoints as checkpoints
import defects_of_computation as computation
import defects_of_passes as passes
import defects_of_results as results
import pytest
from house_properties import COST

from fxopt_core import Transformation
from fxopt_testing import PROPERTIES, ConformanceReport, check_transformation, model_case
from fxopt_testing.cases import ModelCase
from fxopt_testing.conformance import check_property
from fxopt_testing.trial import Subject

NAMES = (
    "spare parts[graph]",
    "attention[modules-bfloat16]",
    "attention[export]",
    "pair[functions]",
    "pair without bias[export-float64]",
    "keywords[modules]",
    "called twice[modules]",
    "tied[modules]",
    "guarded[modules]",
    "frozen[modules]",
    "sizes[modules]",
    "hub[modules]",
    "convolution[modules-train]",
    "rounded quotients[modules]",
    "in-place operations[modules]",
    "writes its input[modules]",
    "repeated[modules]",
    "arithmetic[modules]",
    "products[modules]",
    "many products[modules]",
)
"""Models on which each of the defects shows."""

WRONG: dict[type[Transformation], tuple[str, ...]] = {
    results.WritesCaller: ("caller-untouched",),
    results.ForgetsTies: ("ties-kept",),
    results.KeepsDeadModules: ("no-leftovers",),
    results.Unfreezes: ("flags-kept",),
    results.TrainsAgain: ("flags-kept",),
    results.ChangesDtype: ("dtypes-kept",),
    results.DropsHooks: ("hooks-kept",),
    results.LosesUnusedKeys: ("keys-kept",),
    results.MakesPersistent: ("keys-kept",),
    results.LosesMetadata: ("traces-kept",),
    results.MarksOnNodes: ("survives-deepcopy",),
    results.SharesBetweenResults: ("results-independent",),
    results.DrawsRandomNumbers: ("process-untouched",),
    results.UndoesInexactly: ("exact-undo",),
    results.UndoesNothing: ("exact-undo",),
    results.WrongPiece: ("exact-undo", "checkpoints-load"),
    results.RefusesBadly: ("refusals-explained",),
    results.RefusesForSecrets: ("refusals-explained",),
    checkpoints.DropsABias: ("checkpoints-return",),
    checkpoints.NamesNoInput: ("checkpoints-return",),
    checkpoints.GoesBackWrongly: ("checkpoints-return",),
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
    passes.SignsWithoutOption: ("options-honoured",),
    passes.SignsByIdentity: ("signature-stable",),
    passes.SignsByRuns: ("signature-stable",),
    passes.NeedsPosition: ("constructible",),
    passes.NamedBadly: ("named",),
    passes.ReturnsNothing: ("runs",),
    passes.InsertsBehindUse: ("runs",),
    passes.NeverCompiles: ("well-formed",),
    passes.SwitchesGradientsOff: ("process-untouched",),
    passes.CountsRuns: ("deterministic",),
    passes.CapturesTensor: ("survives-pickling",),
}
"""Passes to the property that is told first, and the one that says what is wrong, where that is another one."""


@cache
def models() -> tuple[ModelCase, ...]:
    return tuple(map(model_case, NAMES))


def report_of(cls: type[Transformation], *properties: str) -> ConformanceReport:
    """Check these properties, or all."""
    made = cls(2.0) if cls is passes.NeedsPosition else cls()
    return check_transformation(made, models=models(), properties=properties or None, raises=False)


@pytest.mark.parametrize("alone", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["", "among-all"])
@pytest.mark.parametrize("cls", WRONG, ids=lambda cls: cls.__name__)
def test_defects_are_found(cls: type[Transformation], alone: bool) -> None:
    """By the properties that say what is wrong, of which the first is told first, among all others too."""
    report = report_of(cls, *(WRONG[cls] if alone else ()))
    assert report.primary is not None, report
    assert report.primary.property == WRONG[cls][0], report
    assert set(WRONG[cls]) <= {each.property for each in report.errors}, report
    assert report.primary.advice
    assert f"properties=['{report.primary.property}']" in report.primary.reproduction


@pytest.mark.parametrize("cls", [passes.WalksTheGraphEachTime, passes.WalksUsersEachTime])
def test_costs_that_grow_too_fast_are_found(cls: type[Transformation]) -> None:
    assert check_property(Subject(cls(), models(), own=True), COST).findings


def test_a_pass_that_finds_nothing_is_told_so() -> None:
    report = report_of(passes.FindsNothing)
    assert {each.property for each in report.errors} == {"finds-sites"}
    assert "changed none of" in str(report)


def test_every_property_is_proved_to_find_something() -> None:
    proved = {name for names in WRONG.values() for name in names}
    assert {each.name for each in PROPERTIES} - proved == {"finds-sites"}
