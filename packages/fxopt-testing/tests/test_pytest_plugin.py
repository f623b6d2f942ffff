"""Properties of passes as tests of pytest."""

from __future__ import annotations

import defects_of_passes as passes
import defects_of_results as results
import pytest

from fxopt_core import PreconditionError
from fxopt_testing import conformance_tests, model_case, passes_of
from fxopt_testing.conformance import subjects_of
from fxopt_testing.findings import ConformanceError
from fxopt_testing.plugin import Check, run_check
from fxopt_testing.properties import PROPERTIES

PAIR = [model_case("pair[modules]")]

BIASLESS = [*PAIR, model_case("pair without bias[modules]")]

test_a_right_pass = conformance_tests(results.Padding(), passes.Commuting(), models=BIASLESS)
test_a_known_flaw = conformance_tests(
    results.KeepsDeadModules(), models=PAIR, properties=["no-leftovers"], expected_failures={"no-leftovers": "a sample"}
)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-such-distribution", "is not installed: pip install no-such-distribution"),
        ("pluggy", "declares no plugin of fxopt"),
    ],
)
def test_distributions_without_passes_are_errors(name: str, message: str) -> None:
    with pytest.raises(PreconditionError, match=message):
        passes_of(name)


def checks_of(function: object) -> list[tuple[str, Check]]:
    (mark,) = function.pytestmark  # type: ignore[attr-defined]  # pytest puts it there
    return [(str(each.id), each.values[0]) for each in mark.args[1]]


def test_each_pass_and_property_is_a_test() -> None:
    named = checks_of(conformance_tests("fxopt-core", passes.Commuting(), passes.Commuting(most=3.0), models=PAIR))
    ids = [name for name, _ in named]
    assert "deep-copy-exact-undo" in ids
    assert ids.count("commuting-runs") == 2  # which pytest tells apart
    assert "commuting-exact-undo" not in ids  # nothing is said of undoing what cannot be undone
    assert len(ids) == 4 * len(PROPERTIES) - 2 - 2  # nor of sites where none is edited


def test_what_does_not_hold_fails_with_its_finding() -> None:
    (subject,) = subjects_of([results.KeepsDeadModules()], tuple(PAIR))
    (rule,) = (each for each in PROPERTIES if each.name == "no-leftovers")
    with pytest.raises(ConformanceError, match="no-leftovers on pair"):
        run_check(subject, rule)
    with pytest.raises(pytest.xfail.Exception, match="a reason: "):
        run_check(subject, rule, "a reason")
