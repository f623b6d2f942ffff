"""The passes of fxopt-cpu keep what the conformance kit asks of every pass, in each form of graph."""

from __future__ import annotations

import pytest
from shipped_passes import CPU, SOME, checks, name_of, tried_everywhere, tried_in_ci

from fxopt_core import compose
from fxopt_cpu import FuseConvolutions, FuseLinears, PlanRegions, isa
from fxopt_cpu.passes.low_precision import SLOW_IN_INT8
from fxopt_testing import Property, conformance_tests
from fxopt_testing.plugin import run_check
from fxopt_testing.trial import Subject

test_planning = conformance_tests(compose(FuseLinears(), PlanRegions()), models=SOME)
quantizing = FuseLinears(weights="int8", min_weights=1, keep_originals=True)
test_quantizing = conformance_tests(quantizing, models=SOME)
test_quantizing_everywhere = pytest.mark.nightly(conformance_tests(quantizing))
if isa() not in SLOW_IN_INT8:
    test_quantizing_convolutions = conformance_tests(
        FuseConvolutions(weights="int8", min_weights=1, min_channels=1, keep_originals=True), models=SOME
    )


@pytest.mark.parametrize(("subject", "rule"), checks(tried_in_ci(CPU)), ids=name_of)
def test_shipped_passes(subject: Subject, rule: Property) -> None:
    run_check(subject, rule)


@pytest.mark.nightly
@pytest.mark.parametrize(("subject", "rule"), checks(tried_everywhere(CPU)), ids=name_of)
def test_shipped_passes_everywhere(subject: Subject, rule: Property) -> None:
    run_check(subject, rule)
