"""Which cases of a test run in CI, and which each night only; and how many examples are drawn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, settings

NIGHTLY = settings.get_current_profile_name() == "nightly"


def mostly_nightly(
    cases: Iterable[Any], in_ci: Collection[str], name: Callable[[Any], str] = str
) -> list[ParameterSet]:
    """Return the cases as parameters of a test, those that CI leaves out with the mark ``nightly``.

    Every way through the code is to run in CI on some model; `nox -s nightly` tries it on the others.

    Args:
        cases: the parameters, in order; a tuple is several of them.
        in_ci: the names of those that CI runs.
        name: from a parameter to its name, which is also its part of the test's name.
    """
    cases = list(cases)
    unknown = set(in_ci) - set(map(name, cases))
    assert not unknown, f"no case is called {', '.join(sorted(unknown))}"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=name(case),
            marks=() if name(case) in in_ci else pytest.mark.nightly,
        )
        for case in cases
    ]


def drawn(examples: int) -> settings:
    """Return settings that draw so many examples, and many more in the profile "nightly"."""
    factor = settings().max_examples / 100 if NIGHTLY else 1
    return settings(max_examples=int(examples * factor), deadline=None, suppress_health_check=list(HealthCheck))
