"""All shipped passes keep what the conformance kit asks of every pass, in each form of graph.

Those of fxopt-cpu are checked in ``test_conformance_cpu.py``, those of fxopt-simplify in their own package, on models
of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from shipped_passes import FAMILIES, PASSES, SOME, checks, name_of, tried_everywhere, tried_in_ci

from fxopt_core import compose
from fxopt_linear import FuseBiasInLinear, MergeLinears
from fxopt_norm import FuseBatchNorm1dInLinear, FuseBatchNorm2dInConv2d
from fxopt_testing import Property, conformance_tests, model_case
from fxopt_testing.pictures import picture
from fxopt_testing.plugin import run_check
from fxopt_testing.trial import Subject

test_a_composition = conformance_tests(
    compose(FuseBatchNorm2dInConv2d(), FuseBatchNorm1dInLinear(), MergeLinears(), inplace=False), models=SOME
)
test_a_reversible_composition = conformance_tests(compose(FuseBiasInLinear(), MergeLinears()), models=SOME)


@pytest.mark.parametrize(("subject", "rule"), checks(tried_in_ci(*FAMILIES)), ids=name_of)
def test_shipped_passes(subject: Subject, rule: Property) -> None:
    run_check(subject, rule)


@pytest.mark.nightly
@pytest.mark.parametrize(("subject", "rule"), checks(tried_everywhere(*FAMILIES)), ids=name_of)
def test_shipped_passes_everywhere(subject: Subject, rule: Property) -> None:
    run_check(subject, rule)


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
