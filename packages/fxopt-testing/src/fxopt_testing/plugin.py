"""Properties of passes as tests of pytest: ``test_conformance[merge-linears-exact-undo]``, which fails with advice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import pytest

from fxopt_core import Transformation
from fxopt_testing.cases import ModelCase
from fxopt_testing.conformance import check_property, chosen_properties, passes_of, subjects_of
from fxopt_testing.findings import ConformanceReport, Property
from fxopt_testing.trial import Subject

#: A pass with its trials, a property, and why that is expected to fail, if it is.
Check: TypeAlias = "tuple[Subject, Property, str | None]"


def conformance_tests(
    *passes: Transformation | str,
    models: Iterable[ModelCase] | None = None,
    site_model: ModelCase | None = None,
    properties: Iterable[str] | None = None,
    expected_failures: Mapping[str, str] | None = None,
) -> Callable[[Check], None]:
    """Return a test function for pytest, parametrised by passes and properties.

    Write ``test_conformance = conformance_tests(MyPass(), "my-distribution")`` into a file of tests. Properties
    that do not apply, such as undoing a pass that is not reversible, become no test.

    Args:
        *passes: passes, or names of installed distributions, whose passes are all taken.
        models: the models to try them on; the zoo if not given.
        site_model: a model that each of them rewrites, tried as well; see `check_transformation`.
        properties: names of the properties; all if not given.
        expected_failures: names of properties that are known not to hold, each with the reason: those tests xfail.

    Raises:
        PreconditionError: A distribution is not installed, or there is no property of a name.
    """
    known = dict(expected_failures or {})
    chosen_properties(known)
    chosen = chosen_properties(properties)
    made = [each for one in passes for each in (passes_of(one) if isinstance(one, str) else (one,))]
    checks = [
        pytest.param((subject, rule, known.get(rule.name)), id=f"{subject.transformation.name}-{rule.name}")
        for subject in subjects_of(made, models, site_model)
        for rule in chosen
        if rule.not_applicable(subject) is None
    ]

    @pytest.mark.parametrize("check", checks)
    def test_conformance(check: Check) -> None:
        """The property holds for the pass on all models."""
        run_check(*check)

    return test_conformance


def run_check(subject: Subject, rule: Property, known: str | None = None) -> None:
    """Check one property of a pass, as a test.

    Raises:
        ConformanceError: It does not hold; or it does, and was expected not to.
    """
    __tracebackhide__ = True  # the finding says it all
    row = check_property(subject, rule, known)
    ConformanceReport(subject.name, (row,)).raise_if_failed()
    # Raised here, not set as a mark, so that the reason has what was found.
    if row.verdict == "known":
        pytest.xfail(f"{known}: {row.findings[0].found}")
