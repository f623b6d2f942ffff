"""The plugin of pytest: ``pytest --fxopt-distribution NAME`` checks every pass of an installed distribution.

Each property of each pass is a test, ``NAME::merge-linears::exact-undo``, that ``-k`` selects and that fails with
advice in place of a traceback. Nothing else of this package, and no torch, is imported unless the option is given.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fxopt_testing.properties import Property
    from fxopt_testing.trial import Subject


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("fxopt", "passes of fxopt")
    group.addoption(
        "--fxopt-distribution",
        action="append",
        default=[],
        metavar="NAME",
        help="check every pass of this installed distribution (may be given several times); without paths of tests, "
        "these checks alone are run",
    )
    group.addoption(
        "--fxopt-thorough",
        action="store_true",
        help="take minutes for each pass: more models, real ones where they are installed, more faults",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Collect no tests of the current directory where the option is given, and no path."""
    asked = config.getoption("--fxopt-distribution")
    if asked and config.args_source is pytest.Config.ArgsSource.INVOCATION_DIR:
        config.args[:] = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the checks; -k and -m select among them as among others."""
    for name in dict.fromkeys(config.getoption("--fxopt-distribution")):
        items.extend(session.genitems(DistributionCollector.from_parent(session, name=name, nodeid=name)))


class DistributionCollector(pytest.Collector):
    """Collects the passes of a distribution."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Return a collector for each pass."""
        from fxopt_core import FxoptError
        from fxopt_testing.distributions import passes_of
        from fxopt_testing.parametrizing import subjects_of

        try:
            passes = passes_of(self.name)
        except FxoptError as error:
            raise self.CollectError(f"{type(error).__name__}: {error}") from error
        thorough = self.config.getoption("--fxopt-thorough")
        return [
            PassCollector.from_parent(self, name=subject.transformation.name, subject=subject)
            for subject in subjects_of(passes, thorough=thorough)
        ]


class PassCollector(pytest.Collector):
    """Collects the properties that apply to a pass; it keeps the trials that they share."""

    def __init__(self, *, subject: Subject, **others: Any) -> None:
        super().__init__(**others)
        self.subject = subject

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Return a test for each property."""
        from fxopt_testing.parametrizing import applicable

        return [
            PropertyItem.from_parent(self, name=rule.name, subject=self.subject, rule=rule)
            for rule in applicable(self.subject)
        ]


class PropertyItem(pytest.Item):
    """One property of one pass, as a test."""

    def __init__(self, *, subject: Subject, rule: Property, **others: Any) -> None:
        super().__init__(**others)
        self.subject, self.rule = subject, rule

    def runtest(self) -> None:
        """Check it."""
        from fxopt_testing.parametrizing import run_check

        run_check(self.subject, self.rule)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the findings as advice; a traceback for anything else."""
        from fxopt_testing.findings import ConformanceError

        if isinstance(excinfo.value, ConformanceError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, None, str]:
        """Return what stands above a failure."""
        return "fxopt", None, f"{self.subject.name}: {self.rule.name}"
