"""`Property`, which every pass must have, and the results of checking: `Finding` and `ConformanceReport`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from fxopt_core import text_table
from fxopt_testing.cases import ModelCase
from fxopt_testing.models import is_of_the_zoo
from fxopt_testing.trial import Subject, Trial


@dataclass(frozen=True)
class Flaw:
    """A flaw: the check of a property yields one where the property does not hold.

    Attributes:
        found: what was found.
        expected: what was expected.
        advice: what to do; by default, the property's advice.
    """

    found: str
    expected: str
    advice: str | None = None


OnModel: TypeAlias = Callable[[Subject, Trial], Iterable[Flaw]]
OnPass: TypeAlias = Callable[[Subject], Iterable[Flaw]]
Applies: TypeAlias = Callable[[Subject, "Trial | None"], "str | None"]


@dataclass(frozen=True)
class Property:
    """A property that every pass must have.

    Attributes:
        name: its name in findings.
        statement: the property, in a sentence.
        advice: what to do where it does not.
        on_model: checks it on one model, or None; only the first flaw that it yields counts.
        on_pass: checks it on the pass as a whole, or None; likewise.
        applies: returns why it does not apply, to the pass (without a trial) or to one model; or None.
        if_changed: whether it holds by itself where the pass changed nothing.
    """

    name: str
    statement: str
    advice: str
    on_model: OnModel | None = None
    on_pass: OnPass | None = None
    applies: Applies | None = None
    if_changed: bool = True

    def not_applicable(self, subject: Subject, trial: Trial | None = None) -> str | None:
        """Return why it does not apply, or None where it does."""
        return None if self.applies is None else self.applies(subject, trial)


def on_model(
    statement: str, advice: str, *, applies: Applies | None = None, if_changed: bool = True
) -> Callable[[OnModel], Property]:
    """Make a check of one model a property, named after the function."""
    return lambda check: Property(_name(check), statement, advice, check, None, applies, if_changed)


def on_pass(statement: str, advice: str, *, applies: Applies | None = None) -> Callable[[OnPass], Property]:
    """Make a check of the pass as a whole a property, named after the function."""
    return lambda check: Property(_name(check), statement, advice, None, check, applies)


def _name(check: Callable[..., object]) -> str:
    return check.__name__.replace("_", "-")


def if_preserving(subject: Subject, trial: Trial | None) -> str | None:
    """Apply to passes that claim to preserve what is computed, on models that compute."""
    if not subject.transformation.preserves_computation:
        return "the pass does not claim preserves_computation"
    return "nothing is computed on the meta device" if trial is not None and trial.case.device == "meta" else None


def if_reversible(subject: Subject, trial: Trial | None) -> str | None:
    """Apply to passes that can be reversed."""
    return None if subject.reversible else "the pass is not reversible"


@dataclass(frozen=True)
class Finding:
    """A property that does not hold.

    Attributes:
        property: name of the property.
        statement: what it says.
        case: id of the smallest model on which it does not hold; None where no model is involved.
        found: what was found.
        expected: what was expected.
        advice: what to do.
        also: ids of further models.
        reproduction: the call that shows it.
        known: why it was expected to fail, where the caller said so.
    """

    property: str
    statement: str
    case: str | None
    found: str
    expected: str
    advice: str
    also: tuple[str, ...]
    reproduction: str
    known: str | None = None

    def __str__(self) -> str:
        """Return rule, finding and advice, and the call, a line each."""
        where = f" on {self.case}" if self.case else ""
        more = f"the same on {len(self.also)} more: {', '.join(self.also[:4])}{', ...' if len(self.also) > 4 else ''}"
        lines = [
            f"rule:      {self.statement}",
            f"found:     {self.found}",
            f"expected:  {self.expected}",
            *([f"also:      {more}"] if self.also else []),
            f"do:        {self.advice}",
            *([f"known:     {self.known}"] if self.known else []),
            f"reproduce: {self.reproduction}",
        ]
        return f"{self.property}{where}\n{textwrap.indent(chr(10).join(lines), '  ')}"


@dataclass(frozen=True)
class Row:
    """The result of checking one property.

    Attributes:
        name: name of the property.
        checked: on how many models it was checked; 1 for a property of the pass itself.
        unchanged: how many models the pass left alone, so that there was nothing to check.
        not_applicable: reasons why it could not be checked, and how often each occurred.
        findings: where it does not hold.
    """

    name: str
    checked: int = 0
    unchanged: int = 0
    not_applicable: dict[str, int] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def verdict(self) -> str:
        """The result in one word."""
        if self.findings:
            return "FAILED" if any(finding.known is None for finding in self.findings) else "known"
        # "unseen" is not "holds": the pass changed no model, so that nothing was checked.
        return "holds" if self.checked else "unseen" if self.unchanged else "n/a"


@dataclass(frozen=True)
class ConformanceReport:
    """The result of checking a pass: true if everything holds, a table when printed.

    Attributes:
        subject: the pass, as a call.
        rows: one for each property.
    """

    subject: str
    rows: tuple[Row, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Everything that was found, causes before their consequences."""
        return tuple(finding for row in self.rows for finding in row.findings)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that make a check fail."""
        return tuple(each for each in self.findings if each.known is None)

    @property
    def primary(self) -> Finding | None:
        """The finding to start with: others may follow from it."""
        return next(iter(self.errors), None)

    def __bool__(self) -> bool:
        return not self.errors

    def raise_if_failed(self) -> None:
        """Raise an error that lists what was found.

        Raises:
            ConformanceError: A property does not hold.
        """
        if self.errors:
            raise ConformanceError(self)

    def __str__(self) -> str:
        table: list[tuple[str, ...]] = [("property", "verdict", "models", "left alone", "n/a")]
        for row in self.rows:
            numbers = (row.checked, row.unchanged, sum(row.not_applicable.values()))
            table.append((row.name, row.verdict, *(str(n or "") for n in numbers)))
        not_applicable = (row for row in self.rows if row.verdict == "n/a")
        lines = [f"{row.name}: n/a, {reason}" for row in not_applicable for reason in row.not_applicable]
        found = [f"\n{finding}" for finding in self.findings]
        return "\n".join([f"{self.subject}: {_count(self.errors)}", *text_table(table), *lines, *found])


def _count(findings: Sequence[Finding]) -> str:
    return f"{len(findings)} finding{'s' * (len(findings) != 1)}" if findings else "all properties hold"


class ConformanceError(AssertionError):
    """A property that every pass has to keep does not hold.

    Attributes:
        report: the whole report.
    """

    def __init__(self, report: ConformanceReport) -> None:
        super().__init__(
            f"{report.subject} does not conform, {_count(report.errors)}; begin with the first, others may follow from "
            "it:\n\n" + "\n\n".join(map(str, report.errors))
        )
        self.report = report


def reproduction(subject: Subject, property_name: str, case: ModelCase | None) -> str:
    """Return the call that fails with the finding: the pass, the one model, the one property."""
    models = ", models=cases" if subject.own else ""
    if case is not None and is_of_the_zoo(case):
        models = f", models=[model_case({case.id!r})]"
    elif case is not None:
        models = f", models=[ModelCase({case.name!r}, ..., form={case.form!r})]"
    return f"check_transformation({subject.name}{models}, properties=[{property_name!r}])"
