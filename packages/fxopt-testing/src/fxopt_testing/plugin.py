"""Properties of passes as tests of pytest: `conformance_tests`, and ``pytest --fxopt-distribution NAME``.

The option checks every pass of an installed distribution. Each property of each pass is a test,
``NAME::merge-linears::exact-undo``, that ``-k`` selects and that fails with advice in place of a traceback. Every run
of pytest loads this plugin, so it imports nothing else of this package, and no torch, until it is asked for a check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

if TYPE_CHECKING:
    from fxopt_core import Transformation
    from fxopt_testing.cases import ModelCase
    from fxopt_testing.properties import Property
    from fxopt_testing.trial import Subject


Check: TypeAlias = "tuple[Subject, Property, str | None]"
"""A pass with its trials, a property of it, and why that is expected to fail, if it is."""


def conformance_tests(
    *passes: Transformation | str,
    models: Iterable[ModelCase] | None = None,
    site_model: ModelCase | None = None,
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
        site_model: a model that each of them rewrites, to be tried, too; see `check_transformation`.
        properties: names of the properties; all if not given.
        expected_failures: names of properties that are known not to hold, each with the reason: those tests xfail.
        thorough: whether to take minutes: more models, real ones where they are installed, more faults.

    Raises:
        PreconditionError: A distribution is not installed, or there is no property of a name.
    """
    from fxopt_testing.conformance import applicable, check_pass, chosen_properties, passes_of, subjects_of

    known = dict(expected_failures or {})
    chosen_properties(known)
    chosen = [each.name for each in chosen_properties(properties)]
    given = None if models is None else tuple(models)
    made = [each for one in passes for each in (passes_of(one) if isinstance(one, str) else (one,))]
    for each in made:
        check_pass(each)
    names = [each.name for each in made]
    subjects = subjects_of(made, given, thorough=thorough, site_model=site_model)
    checks = [
        pytest.param((subject, rule, known.get(rule.name)), id=f"{label}-{rule.name}")
        for subject, label in zip(subjects, _labels(names), strict=True)
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


def run_check(subject: Subject, rule: Property, known: str | None = None) -> None:
    """Check one property of a pass, as a test.

    Raises:
        ConformanceError: It does not hold; or it does, and was expected not to.
    """
    from fxopt_testing.conformance import check_property
    from fxopt_testing.findings import ConformanceReport

    row = check_property(subject, rule, known)
    ConformanceReport(subject.name, (row,)).raise_if_failed()
    if row.verdict == "known":
        pytest.xfail(f"{known}: {row.findings[0].found}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("fxopt", "passes of fxopt")
    group.addoption(
        "--fxopt-distribution",
        action="append",
        default=[],
        metavar="NAME",
        help="check every pass of this installed distribution (may be given several times); without paths of tests, "
        "only these checks are run",
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
        from fxopt_testing.conformance import passes_of, subjects_of

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
        from fxopt_testing.conformance import applicable

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
        run_check(self.subject, self.rule)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the findings as advice; a traceback for anything else."""
        from fxopt_testing.findings import ConformanceError

        if isinstance(excinfo.value, ConformanceError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, None, str]:
        """Return the heading of a failure."""
        return "fxopt", None, f"{self.subject.name}: {self.rule.name}"
