"""Results as the page docs/benchmarks.md: `python -m benchmarks --page` writes it from the files, without measuring."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.machine import Facts
from benchmarks.results import Results
from benchmarks.suite import Absent, Cell, Measured, Table

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
_UNITS = {"s": ((1, "s"), (1e-3, "ms"), (1e-6, "µs")), "B": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))}
_HEAD = """# Benchmarks

<!-- Written by `python -m benchmarks --page` from docs/benchmarks/*.json. Edit neither by hand. -->

What fxopt costs and gains, measured beside other tools.

`nox -s benchmarks` measures everything on your machine, `nox -s benchmarks -- folding merging` these topics;
`--quick` tests the code on tiny models. The [comparison](comparison.md) explains the numbers and compares features.

- All tools of a table run in the same rounds, in random order: each in a process of its own where the table says so,
  elsewhere in one process.
- Times are medians over the rounds, with quartiles in parentheses. Ratios are taken within rounds; above 1 is faster.
- The second row of a table, where it is a copy of the first, shows the noise.
- Compare within one table only: topics ran at different times, on a machine with other work.
- No GPU has been measured.
"""


def page(results: Iterable[Results]) -> str:
    """Return the page."""
    topics = list(results)
    facts = topics[0].machine if topics else {}
    common = {name: value for name, value in facts.items() if all(each.machine.get(name) == value for each in topics)}
    head = f"{_HEAD}- In all topics: {_facts(common)}.\n"
    return "\n".join([head, *(line for each in topics for line in _topic(each, common))]).rstrip() + "\n"


def markdown(table: Table) -> str:
    """Return a table in Markdown, with its heading and text."""
    lines = [f"### {table.title}", "", *([table.text, ""] if table.text else [])]
    return "\n".join([*lines, table_lines(table), ""])


def table_lines(table: Table) -> str:
    """Return the lines of a table alone."""
    lines = [_line(table.columns), _line(["---", *["---:"] * (len(table.columns) - 1)])]
    return "\n".join([*lines, *(_line([row.label, *map(shown, row.cells)]) for row in table.rows)])


def shown(cell: Cell) -> str:
    """Return a cell as people read it.

    >>> shown(Measured(0.0123, "s", 0.012, 0.0125)), shown(Measured(1.306, "x")), shown(Absent("not installed"))
    ('12.3 ms (12.0 to 12.5)', '1.31', '*not installed*')
    """
    if isinstance(cell, Absent):
        return f"*{_escaped(cell.reason)}*"
    if not isinstance(cell, Measured):
        return _escaped(str(cell))
    factor, unit = _unit(cell)
    value = f"{_digits(cell.median / factor)}{unit and ' ' + unit}"
    if cell.low is None or cell.high is None:
        return value
    return f"{value} ({_digits(cell.low / factor)} to {_digits(cell.high / factor)})"


def _topic(results: Results, common: Facts) -> Iterator[str]:
    yield f"## {results.topic.replace('-', ' ').capitalize()}\n"
    yield from map(markdown, results.tables)
    machine = {name: value for name, value in results.machine.items() if name not in common}
    yield f"Measured {_facts(results.run | machine)}.\n"


def _facts(facts: Facts) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _unit(cell: Measured) -> tuple[float, str]:
    units = _UNITS.get(cell.unit)
    if units is None:
        return 1.0, ""
    return next((each for each in units if abs(cell.median) >= each[0]), units[-1])


def _digits(value: float) -> str:
    """Three significant digits, and two decimals for ratios near 1."""
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")
