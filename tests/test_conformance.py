"""All shipped passes keep what the conformance kit asks of every pass, in each form of graph."""

from __future__ import annotations

import pytest

from fxopt_core import Transformation, compose
from fxopt_linear import FuseBiasInLinear, MergeLinears
from fxopt_norm import FuseBatchNorm1dInLinear, FuseBatchNorm2dInConv2d
from fxopt_onednn import FuseRegions, PackConvolutions, PackLinears
from fxopt_testing import check_transformation, conformance_tests, passes_of, zoo

SHIPPED = ("fxopt-linear", "fxopt-norm", "fxopt-arith", "fxopt-onednn", "fxopt-core")
# Their results are what they were given, so that no model shows a change; or they read what another pass has made.
CHANGE_NOTHING = {"deep-copy", "lint-and-recompile", "fuse-regions"}

test_shipped_passes = conformance_tests(*SHIPPED)
test_merging_with_other_options = conformance_tests(MergeLinears(min_group=3, where="*q*"))
test_a_composition = conformance_tests(
    compose(FuseBatchNorm2dInConv2d(), FuseBatchNorm1dInLinear(), MergeLinears(), inplace=False)
)
test_packing = conformance_tests(compose(PackConvolutions(), PackLinears(), FuseRegions()))
test_a_reversible_composition = conformance_tests(compose(FuseBiasInLinear(), MergeLinears()))


@pytest.mark.parametrize("made", [each for name in SHIPPED for each in passes_of(name)], ids=lambda made: made.name)
def test_every_shipped_pass_finds_sites_in_the_zoo(made: Transformation) -> None:
    report = check_transformation(made, models=zoo(), properties=["finds-sites", "checkpoints-load", "traces-kept"])
    assert bool(report.findings) == (made.name in CHANGE_NOTHING), report
