"""`check_transformation`: everything that has to hold of a pass, on every model of the zoo."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from fxopt_core import PreconditionError, Transformation
from fxopt_testing.cases import ModelCase
from fxopt_testing.findings import Finding, Flaw, Report, Row
from fxopt_testing.keeping import process_kept
from fxopt_testing.models import zoo
from fxopt_testing.properties import PROPERTIES, Property
from fxopt_testing.reproductions import reproduction
from fxopt_testing.trial import Subject, Trial


def check_transformation(
    transformation: Transformation,
    *,
    models: Iterable[ModelCase] | None = None,
    properties: Iterable[str] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    thorough: bool = False,
    raises: bool = True,
) -> Report:
    """Check that a pass keeps everything that every pass has to keep.

    Args:
        transformation: the pass, made with the options to be checked.
        models: the models to try it on; the zoo if not given. To add some: ``models=[my_case, *zoo()]``.
        properties: names of the properties to check; all of `PROPERTIES` if not given.
        expected_failures: names of properties that are known not to hold, each with the reason; they are reported and
            make nothing fail. One that holds after all is a finding.
        thorough: whether to take minutes: more models, real ones where they are installed, more faults.
        raises: whether findings are raised. Otherwise they are in the report alone, which is false then.

    Returns:
        The report, with one row for each property.

    Raises:
        ConformanceError: Something was found. It is an AssertionError that reads as advice.
        PreconditionError: What is given is no pass, or names a property that does not exist.

    >>> from fxopt_core import LintAndRecompile
    >>> report = check_transformation(LintAndRecompile(), models=zoo()[:2], properties=["runs", "caller-untouched"])
    >>> bool(report)
    True
    """
    check_pass(transformation)
    cases = zoo(thorough=thorough) if models is None else tuple(models)
    checked = chosen_properties(properties)
    known = dict(expected_failures or {})
    chosen_properties(known)
    subject = Subject(transformation, cases, own=models is not None, thorough=thorough)
    rows = tuple(check_property(subject, each, known.get(each.name)) for each in checked)
    report = Report(subject.name, rows, subject.seconds)
    if raises:
        report.raise_if_failed()
    return report


def check_pass(given: object) -> None:
    """Check that something is a pass, and not a class or a name, say.

    Raises:
        PreconditionError: It is none.
    """
    if not isinstance(given, Transformation):
        made = f"the class {given.__name__}; write {given.__name__}()" if isinstance(given, type) else repr(given)
        raise PreconditionError(f"expected a pass, a fxopt_core.Transformation, found {made}")


def chosen_properties(names: Iterable[str] | None) -> tuple[Property, ...]:
    """Return the properties of these names in their order; all of them for None.

    Raises:
        PreconditionError: There is none of a name.
    """
    if names is None:
        return PROPERTIES
    asked = list(names)
    known = {each.name for each in PROPERTIES}
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise PreconditionError(f"there is no property {unknown[0]!r}; there are {', '.join(sorted(known))}")
    return tuple(each for each in PROPERTIES if each.name in asked)


def check_property(subject: Subject, rule: Property, known: str | None = None) -> Row:
    """Check one property on all models of a subject."""
    started, running = time.perf_counter(), subject.seconds
    with warnings.catch_warnings(), process_kept():
        warnings.simplefilter("ignore")  # torch warns about itself, at places that no pass can help
        row = _on_pass(subject, rule) if rule.on_pass is not None else _on_models(subject, rule)
    findings = _known(rule, row.findings, known)
    seconds = time.perf_counter() - started - (subject.seconds - running)  # the runs serve all properties
    return Row(rule.name, row.checked, row.unchanged, row.not_applicable, findings, seconds)


def _on_pass(subject: Subject, rule: Property) -> Row:
    reason = rule.not_applicable(subject)
    if reason is not None:
        return Row(rule.name, not_applicable={reason: 1})
    assert rule.on_pass is not None
    flaws: list[Flaw] = []
    try:
        flaws.extend(rule.on_pass(subject))
    except Exception as error:
        flaws.append(_raised(error))
    cases = {case.id: case for case in subject.cases}
    findings = tuple(_finding(subject, rule, flaw, cases.get(flaw.case or "")) for flaw in flaws)
    return Row(rule.name, checked=1, findings=findings)


def _on_models(subject: Subject, rule: Property) -> Row:
    reason = rule.not_applicable(subject)
    if reason is not None:
        return Row(rule.name, not_applicable={reason: 1})
    checked = unchanged = 0
    skipped: Counter[str] = Counter()
    found: list[tuple[Trial, Flaw]] = []
    for trial in subject.trials:
        reason = rule.not_applicable(subject, trial)
        if rule.if_changed and trial.error is not None:
            reason = reason or "the pass raised"
        if reason is not None:
            skipped[reason] += 1
        elif rule.if_changed and not trial.changed:
            unchanged += 1
        else:
            checked += 1
            found.extend((trial, flaw) for flaw in _flaws(subject, rule, trial))
    return Row(rule.name, checked, unchanged, dict(skipped), tuple(_grouped(subject, rule, found)))


def _flaws(subject: Subject, rule: Property, trial: Trial) -> Sequence[Flaw]:
    assert rule.on_model is not None
    try:
        return tuple(rule.on_model(subject, trial))
    except Exception as error:
        return (_raised(error),)


def _raised(error: Exception) -> Flaw:
    return Flaw(f"{type(error).__name__}: {error}", "no error")


def _grouped(subject: Subject, rule: Property, found: Sequence[tuple[Trial, Flaw]]) -> Iterable[Finding]:
    """Yield one finding for each severity: that of the smallest model, with the names of the others."""
    for severity in ("error", "advice"):
        mine = sorted((each for each in found if each[1].severity == severity), key=lambda each: each[0].size)
        if mine:
            trial, flaw = mine[0]
            also = tuple(dict.fromkeys(each.case.id for each, _ in mine if each is not trial))
            yield _finding(subject, rule, flaw, trial.case, also)


def _finding(
    subject: Subject, rule: Property, flaw: Flaw, case: ModelCase | None, also: tuple[str, ...] = ()
) -> Finding:
    return Finding(
        property=rule.name,
        statement=rule.statement,
        case=case.id if case is not None else flaw.case,
        found=flaw.found,
        expected=flaw.expected,
        advice=flaw.advice or rule.advice,
        also=also,
        reproduction=reproduction(subject, rule.name, case),
        severity=flaw.severity,
    )


def _known(rule: Property, findings: tuple[Finding, ...], known: str | None) -> tuple[Finding, ...]:
    from dataclasses import replace

    if known is None:
        return findings
    if any(each.severity == "error" for each in findings):
        return tuple(replace(each, known=known) for each in findings)
    advice = "Take it out of expected_failures."
    found = f"it holds, and was expected not to: {known}"
    return (*findings, Finding(rule.name, rule.statement, None, found, "a failure", advice))
