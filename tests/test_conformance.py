"""All shipped passes keep what the conformance kit asks of every pass, in each form of graph.

The passes of fxopt-simplify are checked in their own package, on models of their own.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest
from generated_models import generated_cases
from house_properties import COST
from nightly import mostly_nightly

from fxopt_core import compose
from fxopt_cpu import FuseConvolutions, FuseLinears, PlanRegions, isa
from fxopt_cpu.passes.low_precision import SLOW_IN_INT8
from fxopt_linear import FuseBiasInLinear, MergeLinears
from fxopt_norm import FuseBatchNorm1dInLinear, FuseBatchNorm2dInConv2d
from fxopt_testing import ModelCase, Property, conformance_tests, model_case, passes_of, zoo
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
PASSES = [each for name in SHIPPED for each in passes_of(name)]
MODELS = [list(cases) for _, cases in itertools.groupby(zoo(), key=lambda case: case.name)]
GENERATED = tuple(generated_cases(2))


def in_ci(number: int) -> tuple[ModelCase, ...]:
    """Return each model of the zoo in every third of its forms, dtypes and modes, other ones for the next pass.

    Passes read all forms of graph by the same code, so that each cell is met by some pass; each night, by all of them.
    """
    chosen = (cases[number % min(3, len(cases)) :: 3] for cases in MODELS)
    return (*itertools.chain.from_iterable(chosen), *GENERATED)


SUBJECTS = [Subject(each, in_ci(number)) for number, each in enumerate(PASSES)]  # tried once, for all tests
EVERYWHERE = [Subject(each, (*zoo(), *GENERATED)) for each in PASSES]

SOME = zoo()[::6]  # for passes that are tried on all of the zoo by themselves

test_a_composition = conformance_tests(
    compose(FuseBatchNorm2dInConv2d(), FuseBatchNorm1dInLinear(), MergeLinears(), inplace=False), models=SOME
)
test_planning = conformance_tests(compose(FuseLinears(), PlanRegions()), models=SOME)
quantizing = FuseLinears(weights="int8", min_weights=1, keep_originals=True)
test_quantizing = conformance_tests(quantizing, models=SOME)
test_quantizing_everywhere = pytest.mark.nightly(conformance_tests(quantizing))
if isa() not in SLOW_IN_INT8:
    test_quantizing_convolutions = conformance_tests(
        FuseConvolutions(weights="int8", min_weights=1, min_channels=1, keep_originals=True), models=SOME
    )
test_a_reversible_composition = conformance_tests(compose(FuseBiasInLinear(), MergeLinears()), models=SOME)


def name_of(value: Subject | Property) -> str:
    return value.transformation.name if isinstance(value, Subject) else value.name


@pytest.mark.parametrize(
    ("subject", "rule"), [(each, rule) for each in SUBJECTS for rule in applicable(each)], ids=name_of
)
def test_shipped_passes(subject: Subject, rule: Property) -> None:
    run_check(subject, rule)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("subject", "rule"), [(each, rule) for each in EVERYWHERE for rule in applicable(each)], ids=name_of
)
def test_shipped_passes_everywhere(subject: Subject, rule: Property) -> None:
    run_check(subject, rule)


COST_IN_CI = ("merge-linears", "fuse-bias-in-linear")  # that of all passes takes half of the time of all


@pytest.mark.parametrize("subject", mostly_nightly(EVERYWHERE, COST_IN_CI, name_of))
def test_what_passes_cost(subject: Subject) -> None:
    run_check(subject, COST)


ORDERED = ("attention[modules]", "hub[functions]", "blocks[modules]", "convolution[modules]", "many products[modules]")
"""Models with several sites each, whose order sets and hashes could decide."""


def made() -> dict[str, list[str]]:
    """Return the signature of each shipped pass, and what it makes of some models."""
    found = {}
    for each in PASSES:
        pictures = [repr(picture(each(case.capture().graph_module))) for case in map(model_case, ORDERED)]
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
