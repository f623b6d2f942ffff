"""What the comparison page says in numbers: taken from the files of results, and written between two marks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.page import table_lines
from benchmarks.results import Results
from benchmarks.suite import Cell, Measured, Row, Table

PAGE = Path(__file__).parent.parent / "docs" / "comparison.md"
BEGIN, END = "<!-- numbers: written by `python -m benchmarks --page` -->", "<!-- end of numbers -->"
_SPEED = "times as fast as eager"


def with_numbers(text: str, results: Iterable[Results]) -> str:
    """Return the text of the page with the numbers of these results between its marks.

    Raises:
        ValueError: A mark is missing.
    """
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"the page needs the lines {BEGIN!r} and {END!r}, between which numbers are written")
    return f"{before}{BEGIN}\n\n{''.join(numbers(list(results)))}{END}{after}"


def numbers(results: Sequence[Results]) -> Iterator[str]:
    """Yield the tables: correctness, and speed of inference."""
    by_topic = {each.topic: each.tables for each in results}
    if "correctness" in by_topic:
        first, *_ = by_topic["correctness"]
        yield f"**Right results** on adversarial cases, and how many were rewritten:\n\n{table_lines(first)}\n\n"
    for topic, title in (("folding", "Folding batch norm"), ("cpu-inference", "CPU inference")):
        if topic in by_topic:
            yield f"**{title}**, times as fast as eager:\n\n{table_lines(speeds(by_topic[topic]))}\n\n"


def speeds(tables: Sequence[Table]) -> Table:
    """One line for each way to run a model, one column for each model, with the medians."""
    ways = dict.fromkeys(row.label for table in tables for row in table.rows)
    found = {(table.title, row.label): _speed(table, row) for table in tables for row in table.rows}
    titles = [table.title for table in tables]
    rows = tuple(Row(way, tuple(found.get((title, way), "-") for title in titles)) for way in ways)
    return Table("", ("", *titles), rows)


def _speed(table: Table, row: Row) -> Cell:
    if _SPEED not in table.columns:
        return "-"
    cell = row.cells[table.columns.index(_SPEED) - 1]
    return Measured(cell.median, "x") if isinstance(cell, Measured) else "-"
