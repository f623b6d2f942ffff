"""`check_transformation`: the properties that every pass must have, on every model of the zoo."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution

from fxopt_core import PreconditionError, Registry, Transformation, check_is_transformation
from fxopt_testing.cases import ModelCase
from fxopt_testing.findings import ConformanceReport, Finding, Flaw, OnModel, Row, reproduction
from fxopt_testing.models import zoo
from fxopt_testing.properties import PROPERTIES, Property
from fxopt_testing.properties.run import finds_sites
from fxopt_testing.trial import Subject, Trial, process_kept


def check_transformation(
    transformation: Transformation,
    *,
    models: Iterable[ModelCase] | None = None,
    site_model: ModelCase | None = None,
    properties: Iterable[str] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    raises: bool = True,
) -> ConformanceReport:
    """Check a pass against the properties that every pass must have.

    Args:
        transformation: the pass, made with the options to be checked.
        models: the models to try it on; the zoo if not given. To add some: ``models=[my_case, *zoo()]``.
        site_model: a model that the pass rewrites. It is tried beside the others, also in other forms of graph, in
            bfloat16 and in the other mode, as far as these exist. If neither it nor ``models`` is given, and the
            zoo has no site for the pass, the graph of the example in its docstring is tried.
        properties: names of the properties to check; all of `PROPERTIES` if not given. If no model has a site, that
            is a finding, whichever of the properties that look at changes are checked.
        expected_failures: names of properties that are known not to hold, each with the reason; they are reported but
            fail nothing. One that holds after all is a finding.
        raises: whether findings are raised. Otherwise they are only in the report, which is then false.

    Returns:
        The report, with one row for each property.

    Raises:
        ConformanceError: Something was found. It is an AssertionError that reads as advice.
        PreconditionError: The argument is not a pass, or names a property that does not exist.

    >>> from fxopt_core import LintAndRecompile
    >>> report = check_transformation(LintAndRecompile(), models=zoo()[:2], properties=["runs", "caller-untouched"])
    >>> bool(report)
    True
    """
    checked = chosen_properties(properties)
    known = dict(expected_failures or {})
    # Only for its error: a misspelt name would excuse nothing, and nobody would notice.
    chosen_properties(known)
    (subject,) = subjects_of([transformation], models, site_model)
    rows = [check_property(subject, each, known.get(each.name)) for each in checked]
    if finds_sites not in checked and any(row.unchanged for row in rows) and not subject.changed:
        rows.append(check_property(subject, finds_sites, known.get(finds_sites.name)))
    report = ConformanceReport(subject.name, tuple(rows))
    if raises:
        report.raise_if_failed()
    return report


def chosen_properties(names: Iterable[str] | None) -> tuple[Property, ...]:
    """Return the properties of these names in their order; all of them for None.

    Raises:
        PreconditionError: There is no property of that name.
    """
    known = {each.name for each in PROPERTIES}
    chosen = known if names is None else set(names)
    if unknown := sorted(chosen - known):
        raise PreconditionError(f"there is no property {unknown[0]!r}; there are {', '.join(sorted(known))}")
    return tuple(each for each in PROPERTIES if each.name in chosen)


def passes_of(name: str) -> tuple[Transformation, ...]:
    """Return all passes of an installed distribution, made with their defaults, by name.

    Only its own plugins are read, so that no other one can interfere.

    Args:
        name: name of the distribution, such as "fxopt-linear".

    Raises:
        PreconditionError: It is not installed, or declares no plugin, or its plugins offer no pass.
        PluginLoadError: One of its plugins cannot be loaded; the cause is chained.
        PassOptionError: A pass cannot be made without options.

    >>> [each.name for each in passes_of("fxopt-core")]
    ['deep-copy', 'lint-and-recompile']
    """
    try:
        points = distribution(name).entry_points
    except PackageNotFoundError:
        raise PreconditionError(f"distribution {name!r} is not installed: pip install {name}") from None
    plugins = [point for point in points if point.group == "fxopt"]
    if not plugins:
        raise PreconditionError(
            f"distribution {name!r} declares no plugin of fxopt: its pyproject.toml needs "
            "[project.entry-points.fxopt]; install it again after changing that"
        )
    found = Registry(entry_points=plugins)
    for error in found.failed.values():
        raise error
    if not found.available():
        raise PreconditionError(f"the plugins of distribution {name!r} offer no pass")
    return tuple(found.create(name) for name in found.available())


def subjects_of(
    passes: Iterable[Transformation],
    models: Iterable[ModelCase] | None = None,
    site_model: ModelCase | None = None,
) -> list[Subject]:
    """Pair passes with the models to try them on; nothing runs yet.

    Raises:
        PreconditionError: One of them is not a pass.
    """
    cases, own = (zoo(), False) if models is None else (tuple(models), True)
    subjects = []
    for each in passes:
        check_is_transformation(each, "what is checked")
        subjects.append(Subject(each, cases, own=own, site_model=site_model))
    return subjects


def check_property(subject: Subject, rule: Property, known: str | None = None) -> Row:
    """Check one property on all models of a subject; `known` is why it is expected to fail."""
    reason = rule.not_applicable(subject)
    if reason is not None:
        return Row(rule.name, not_applicable={reason: 1})
    with warnings.catch_warnings(), process_kept():
        warnings.simplefilter("ignore")  # torch warns about itself, at places that no pass can help
        row = _on_models(subject, rule, rule.on_model) if rule.on_model is not None else _on_pass(subject, rule)
    if known is not None and row.findings:
        return replace(row, findings=tuple(replace(each, known=known) for each in row.findings))
    if known is not None:
        flaw = Flaw(f"it holds, and was expected not to: {known}", "a failure", "Take it out of expected_failures.")
        return replace(row, findings=(_finding(subject, rule, flaw, None),))
    return row


def _on_pass(subject: Subject, rule: Property) -> Row:
    assert rule.on_pass is not None
    flaw = _first(rule.on_pass, subject)
    return Row(rule.name, checked=1, findings=() if flaw is None else (_finding(subject, rule, flaw, None),))


def _on_models(subject: Subject, rule: Property, check: OnModel) -> Row:
    checked = unchanged = 0
    skipped: Counter[str] = Counter()
    found: list[tuple[Trial, Flaw]] = []
    for trial in subject.trials:
        reason = rule.not_applicable(subject, trial)
        # The property `runs` reports what the pass raised.
        if rule.if_changed and trial.error is not None:
            reason = reason or "the pass raised"
        if reason is not None:
            skipped[reason] += 1
        elif rule.if_changed and not trial.changed:
            unchanged += 1
        else:
            checked += 1
            flaw = _first(check, subject, trial)
            found += [] if flaw is None else [(trial, flaw)]
    found.sort(key=lambda each: each[0].size)
    also = tuple(dict.fromkeys(trial.case.id for trial, _ in found[1:]))
    findings = tuple(_finding(subject, rule, flaw, trial.case, also) for trial, flaw in found[:1])
    return Row(rule.name, checked, unchanged, dict(skipped), findings)


def _first(check: Callable[..., Iterable[Flaw]], *given: Subject | Trial) -> Flaw | None:
    """Return the first flaw that a check yields, as others mostly follow from it; an error of the check is one, too."""
    try:
        return next(iter(check(*given)), None)
    except Exception as error:
        return Flaw(f"{type(error).__name__}: {error}", "no error")


def _finding(
    subject: Subject, rule: Property, flaw: Flaw, case: ModelCase | None, also: tuple[str, ...] = ()
) -> Finding:
    return Finding(
        property=rule.name,
        statement=rule.statement,
        case=None if case is None else case.id,
        found=flaw.found,
        expected=flaw.expected,
        advice=flaw.advice or rule.advice,
        also=also,
        reproduction=reproduction(subject, rule.name, case),
    )
