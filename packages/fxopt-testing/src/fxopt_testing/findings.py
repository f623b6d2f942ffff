"""What a check finds, and how it is told: `Finding`, `Report`, `ConformanceError`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Severity: TypeAlias = Literal["error", "advice"]


@dataclass(frozen=True)
class Flaw:
    """What a property's check yields where it does not hold.

    Attributes:
        found: what is so.
        expected: what should be.
        advice: what to do, where the check knows more than the property does.
        case: id of the model, where the check is one of the pass as a whole.
        severity: "advice" does not make a check fail.
    """

    found: str
    expected: str
    advice: str | None = None
    case: str | None = None
    severity: Severity = "error"


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
        reproduction: a program that shows it.
        severity: "error", or "advice", which makes nothing fail.
        known: why it was expected to fail, where the caller said so.
    """

    property: str
    statement: str
    case: str | None
    found: str
    expected: str
    advice: str
    also: tuple[str, ...] = ()
    reproduction: str = ""
    severity: Severity = "error"
    known: str | None = None

    def __str__(self) -> str:
        """Return it as advice of several lines."""
        where = f" on {self.case}" if self.case else ""
        head = f"{self.property}{where}" + (" (advice)" if self.severity == "advice" else "")
        more = f"the same on {len(self.also)} more: {', '.join(self.also[:4])}{', ...' if len(self.also) > 4 else ''}"
        lines = [
            f"rule:      {self.statement}",
            f"found:     {self.found}",
            f"expected:  {self.expected}",
            *([f"also:      {more}"] if self.also else []),
            f"do:        {self.advice}",
            *([f"known:     {self.known}"] if self.known else []),
            *(["reproduce:", textwrap.indent(self.reproduction.rstrip(), "    ")] if self.reproduction else []),
        ]
        return f"{head}\n{textwrap.indent(chr(10).join(lines), '  ')}"


@dataclass(frozen=True)
class Row:
    """What checking one property came to.

    Attributes:
        name: that of the property.
        checked: on how many models it was checked; 1 for a property of the pass itself.
        unchanged: how many models the pass left alone, so that it holds on them.
        not_applicable: reasons why it could not be checked, with how often.
        findings: where it does not hold.
        seconds: how long that took.
    """

    name: str
    checked: int = 0
    unchanged: int = 0
    not_applicable: dict[str, int] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """One word for it."""
        if any(finding.severity == "error" and finding.known is None for finding in self.findings):
            return "FAILED"
        if any(finding.known is not None for finding in self.findings):
            return "known"
        if self.findings:
            return "advice"
        return "holds" if self.checked or self.unchanged else "n/a"


@dataclass(frozen=True)
class Report:
    """What checking a pass came to: true if everything holds, a table when printed.

    Attributes:
        subject: the pass, as a call.
        rows: one for each property.
        running: how many seconds capturing the models and running the pass on them took.
    """

    subject: str
    rows: tuple[Row, ...]
    running: float = 0.0

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Everything that was found, what others follow from first."""
        return tuple(finding for row in self.rows for finding in row.findings)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that make a check fail."""
        return tuple(each for each in self.findings if each.severity == "error" and each.known is None)

    @property
    def primary(self) -> Finding | None:
        """The finding to begin with: others may follow from it."""
        return next(iter(self.errors), None)

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.running + sum(row.seconds for row in self.rows)

    def __bool__(self) -> bool:
        """Whether everything holds."""
        return not self.errors

    def raise_if_failed(self) -> None:
        """Raise an error that lists what was found.

        Raises:
            ConformanceError: Something was.
        """
        if self.errors:
            raise ConformanceError(self)

    def __str__(self) -> str:
        """Return the table, and what was found beneath it."""
        table: list[tuple[str, ...]] = [("property", "verdict", "models", "left alone", "n/a", "s")]
        for row in self.rows:
            numbers = (row.checked, row.unchanged, sum(row.not_applicable.values()))
            table.append((row.name, row.verdict, *(str(n or "") for n in numbers), f"{row.seconds:.1f}"))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        lines.append(f"capturing the models and running the pass on them: {self.running:.1f} s")
        lines += [f"{row.name}: n/a, {reason}" for row in self.rows for reason in _whole_reasons(row)]
        found = [f"\n{finding}" for finding in self.findings]
        return "\n".join([f"{self.subject}: {_count(self.errors)}", *lines, *found])


def _whole_reasons(row: Row) -> Sequence[str]:
    return tuple(row.not_applicable) if row.verdict == "n/a" else ()


def _count(findings: Sequence[Finding]) -> str:
    return f"{len(findings)} finding{'s' * (len(findings) != 1)}" if findings else "all properties hold"


class ConformanceError(AssertionError):
    """A pass does not keep what every pass has to.

    Attributes:
        report: all of the report.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(
            f"{report.subject} does not conform, {_count(report.errors)}; begin with the first, others may follow from "
            "it:\n\n" + "\n\n".join(map(str, report.errors))
        )
        self.report = report
