"""The kit finds nothing in passes that are right, on a sixth of the zoo."""

from __future__ import annotations

import defects_of_checkpoints as checkpoints
import defects_of_passes as passes
import defects_of_results as results
import pytest

from fxopt_core import Transformation
from fxopt_testing import check_transformation, zoo

RIGHT: dict[type[Transformation], set[str]] = {
    results.Renewing: {"checkpoints-load", "finds-sites"},
    results.Padding: set(),
    passes.Commuting: {"finds-sites"},
}
"""Passes that are right, to the properties that give advice: these edit keys by hand, or know one form of graph."""


@pytest.mark.parametrize("cls", RIGHT, ids=lambda cls: cls.__name__)
def test_passes_that_are_right_pass(cls: type[Transformation]) -> None:
    report = check_transformation(cls(), models=zoo()[1::6])
    assert report
    assert {each.property for each in report.findings} == RIGHT[cls], report


def test_weights_of_a_pass_that_computes_new_ones_come_back() -> None:
    report = check_transformation(checkpoints.Doubling(), models=zoo()[::8])
    assert report
    assert not report.findings, report
