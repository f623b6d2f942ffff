"""`conformance_tests`: the properties of passes as tests of pytest, one for each pass and property."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

import pytest

from fxopt_core import Transformation
from fxopt_testing.cases import ModelCase
from fxopt_testing.conformance import check_pass, check_property, chosen_properties
from fxopt_testing.distributions import passes_of
from fxopt_testing.findings import Report
from fxopt_testing.models import zoo
from fxopt_testing.properties import Property
from fxopt_testing.trial import Subject

Check: TypeAlias = tuple[Subject, Property, "str | None"]
"""A pass with its trials, a property of it, and why that is expected to fail, if it is."""


def conformance_tests(
    *passes: Transformation | str,
    models: Iterable[ModelCase] | None = None,
    properties: Iterable[str] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    thorough: bool = False,
) -> Callable[[Check], None]:
    """Return a test function for pytest, parametrised by passes and properties.

    Write ``test_conformance = conformance_tests(MyPass(), "my-distribution")`` into a file of tests. What a property
    says nothing about, such as undoing a pass that is not reversible, is no test.

    Args:
        *passes: passes, or names of installed distributions, of which all passes are taken.
        models: the models to try them on; the zoo if not given.
        properties: names of the properties; all if not given.
        expected_failures: names of properties that are known not to hold, each with the reason: those tests xfail.
        thorough: whether to take minutes: more models, real ones where they are installed, more faults.

    Raises:
        PreconditionError: A distribution is not installed, or there is no property of a name.
    """
    known = dict(expected_failures or {})
    chosen_properties(known)
    chosen = [each.name for each in chosen_properties(properties)]
    given = None if models is None else tuple(models)
    made = [each for one in passes for each in (passes_of(one) if isinstance(one, str) else (one,))]
    for each in made:
        check_pass(each)
    names = [each.name for each in made]
    checks = [
        pytest.param((subject, rule, known.get(rule.name)), id=f"{label}-{rule.name}")
        for subject, label in zip(subjects_of(made, given, thorough=thorough), _labels(names), strict=True)
        for rule in applicable(subject)
        if rule.name in chosen
    ]

    @pytest.mark.parametrize("check", checks)
    def test_conformance(check: Check) -> None:
        """The property holds of the pass on all models."""
        run_check(*check)

    return test_conformance


def _labels(names: list[str]) -> Iterator[str]:
    """Yield a label for each pass: its name, with a number where several have it."""
    for number, name in enumerate(names):
        yield name if names.count(name) == 1 else f"{name}#{names[:number].count(name) + 1}"


def subjects_of(
    passes: Iterable[Transformation], models: tuple[ModelCase, ...] | None = None, *, thorough: bool = False
) -> list[Subject]:
    """Return passes with the models that they are to be tried on; none is tried yet."""
    cases = zoo(thorough=thorough) if models is None else models
    return [Subject(each, cases, own=models is not None, thorough=thorough) for each in passes]


def applicable(subject: Subject) -> Iterator[Property]:
    """Yield the properties that say something about a pass."""
    for rule in chosen_properties(None):
        if rule.not_applicable(subject) is None:
            yield rule


def run_check(subject: Subject, rule: Property, known: str | None = None) -> None:
    """Check one property of a pass, as a test.

    Raises:
        ConformanceError: It does not hold; or it does, and was expected not to.
    """
    row = check_property(subject, rule, known)
    Report(subject.name, (row,)).raise_if_failed()
    if row.verdict == "known":
        pytest.xfail(f"{known}: {row.findings[0].found}")
