"""All shipped passes keep what the conformance kit asks of every pass, in each form of graph.

The passes of fxopt-simplify are checked in their own package, on models of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from generated_models import generated_cases
from house_properties import COST

from fxopt_core import compose
from fxopt_cpu import FuseConvolutions, FuseLinears, PlanRegions, isa
from fxopt_cpu.passes.low_precision import SLOW_IN_INT8
from fxopt_linear import FuseBiasInLinear, MergeLinears
from fxopt_norm import FuseBatchNorm1dInLinear, FuseBatchNorm2dInConv2d
from fxopt_testing import Property, conformance_tests, passes_of, zoo
from fxopt_testing.conformance import applicable
from fxopt_testing.pictures import picture
from fxopt_testing.plugin import run_check
from fxopt_testing.trial import Subject

SHIPPED = (
    "fxopt-linear",
    "fxopt-norm",
    "fxopt-arith",
    "fxopt-cpu",
    "fxopt-core",
)
CASES = (*zoo(), *generated_cases(2))
SUBJECTS = [Subject(each, CASES) for name in SHIPPED for each in passes_of(name)]  # tried once, for all tests

SOME = zoo()[::6]  # for passes that are tried on all of the zoo by themselves

test_a_composition = conformance_tests(
    compose(FuseBatchNorm2dInConv2d(), FuseBatchNorm1dInLinear(), MergeLinears(), inplace=False), models=SOME
)
test_planning = conformance_tests(compose(FuseLinears(), PlanRegions()), models=SOME)
test_quantizing = conformance_tests(FuseLinears(weights="int8", min_weights=1, keep_originals=True))
if isa() not in SLOW_IN_INT8:
    test_quantizing_convolutions = conformance_tests(
        FuseConvolutions(weights="int8", min_weights=1, min_channels=1, keep_originals=True), models=SOME
    )
test_a_reversible_composition = conformance_tests(compose(FuseBiasInLinear(), MergeLinears()), models=SOME)


def name_of(value: Subject | Property) -> str:
    return value.transformation.name if isinstance(value, Subject) else value.name


COST_BY_DAY = ("merge-linears", "fuse-bias-in-linear")  # that of all passes takes half of the time of all
CHECKS = [
    *((subject, rule) for subject in SUBJECTS for rule in applicable(subject)),
    *(
        pytest.param(subject, COST, marks=() if name_of(subject) in COST_BY_DAY else pytest.mark.nightly)
        for subject in SUBJECTS
        if COST.not_applicable(subject) is None
    ),
]


@pytest.mark.parametrize(("subject", "rule"), CHECKS, ids=name_of)
def test_shipped_passes(subject: Subject, rule: Property) -> None:
    run_check(subject, rule)


def made() -> dict[str, list[str]]:
    """Return the signature of each shipped pass, and what it makes of some models."""
    found = {}
    for each in (each for name in SHIPPED for each in passes_of(name)):
        pictures = [repr(picture(each(case.capture().graph_module))) for case in SOME[::2]]
        found[each.name] = [each.signature, *pictures]
    return found


ELSEWHERE = """
import json, sys
sys.path[:] = json.load(sys.stdin)
from test_conformance import made
print(json.dumps(made()))
"""


def test_passes_are_and_do_the_same_in_another_process_with_other_hashes() -> None:
    command, environment = [sys.executable, "-W", "ignore", "-c", ELSEWHERE], {**os.environ, "PYTHONHASHSEED": "4321"}
    path = json.dumps(sys.path)
    done = subprocess.run(command, env=environment, input=path, text=True, capture_output=True, check=True)
    assert json.loads(done.stdout) == made()
