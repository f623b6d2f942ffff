"""What ``pytest --fxopt-distribution NAME`` collects: the properties of all passes of installed distributions."""

from __future__ import annotations

import pytest

from fxopt_testing.plugin import Check, conformance_tests, run_check


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each property of each pass."""
    names = dict.fromkeys(metafunc.config.getoption("--fxopt-distribution"))
    (mark,) = conformance_tests(*names).pytestmark  # type: ignore[attr-defined]  # pytest puts it there
    metafunc.parametrize(*mark.args)


def test_conformance(check: Check) -> None:
    """The property holds for the pass on all models."""
    __tracebackhide__ = True
    run_check(*check)
