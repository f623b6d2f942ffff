"""The numbers of the comparison page and the README: taken from the files of results, written between marks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.page import table_lines
from benchmarks.results import Results
from benchmarks.suite import Cell, Measured, Row, Table

PAGE = Path(__file__).parent.parent / "docs" / "comparison.md"
ENCODERS = PAGE.with_name("cpu-inference.md")
BEGIN, END = "<!-- numbers: written by `python -m benchmarks --page` -->", "<!-- end of numbers -->"
CHART, END_OF_CHART = "<!-- efficiency: written by `python -m benchmarks --page` -->", "<!-- end of efficiency -->"
README = Path(__file__).parent.parent / "README.md"
PICTURE = Path(__file__).parent.parent / "docs" / "_static" / "efficiency.svg"
_SPEED = "times as fast as eager"


def with_numbers(text: str, results: Iterable[Results]) -> str:
    """Return the text of the page with the numbers of these results between its marks.

    Raises:
        ValueError: A mark is missing.
    """
    return between(text, BEGIN, END, "".join(numbers(list(results))))


def with_encoders(text: str, results: Iterable[Results]) -> str:
    """Return the text of the page on `cpu-inference` with the speeds of encoders, a row for each."""
    tables = [table for each in results if each.topic == "encoders" for table in each.tables]
    if not tables:
        return text
    _, _, *others = speeds(tables).rows  # eager and its copy
    ways, *rows = zip(*((row.label, *row.cells) for row in others), strict=True)
    titles = [f"{table.title}, {re.findall(r'[0-9]+ threads?', table.text)[0]}" for table in tables]
    table = Table("", ("", *ways), tuple(map(Row, titles, rows)))
    return between(text, BEGIN, END, f"{table_lines(table)}\n\n")


def between(text: str, begin: str, end: str, content: str) -> str:
    """Return a text with new content between two marks."""
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the page needs the lines {begin!r} and {end!r}, between which numbers are written")
    return f"{before}{begin}\n\n{content}{end}{after}"


def with_chart(text: str, results: Results) -> str:
    """Return the README with the table of efficiency for short texts between its marks, if it has them.

    A cell has the ratio to torch float32, and the mean cosine if that is not 1.000. The cell is bold where fxopt leads.
    """
    if CHART not in text:
        return text
    ways = [row.label for row in results.tables[0].rows[1:]]
    lines = ["".join(f"| {cell} " for cell in ("", *ways)) + "|", "| --- " + "| ---: " * len(ways) + "|"]
    shortest = results.tables[0].title.rpartition(", ")[2]
    for table in charted(results):
        if not table.title.endswith(shortest):
            continue
        found = {row.label: row.cells for row in table.rows}
        speeds = {way: cells[1].median for way, cells in found.items() if isinstance(cells[1], Measured)}
        best = max(speeds, key=speeds.__getitem__)
        cosines = {way: f"{float(str(found[way][2])):.3f}" for way in speeds}
        shown = {way: f"{speeds[way]:.2f}" + f" ({cosines[way]})" * (cosines[way] != "1.000") for way in speeds}
        if best.startswith("fxopt"):
            shown[best] = f"**{shown[best]}**"
        lines.append("".join(f"| {cell} " for cell in (table.title, *(shown.get(way, "-") for way in ways))) + "|")
    return between(text, CHART, END_OF_CHART, "\n".join([*lines, "", ""]))


def charted(results: Results) -> list[Table]:
    """Return the tables of texts a second, of a model and a length each."""
    return [table for table in results.tables if table.columns == results.tables[0].columns]


def chart(results: Results) -> str:
    """Return a picture: for each contender a dot for each model and length, and a bar to their geometric mean."""
    speeds: dict[str, list[float]] = {}
    kept: dict[str, list[float]] = {}
    for table in charted(results):
        for row in table.rows:
            if isinstance(row.cells[1], Measured):
                speeds.setdefault(row.label, []).append(row.cells[1].median)
                kept.setdefault(row.label, []).append(float(str(row.cells[2])))
    means = {way: math.exp(sum(map(math.log, each)) / len(each)) for way, each in speeds.items()}
    scale = 420 / max(value for each in speeds.values() for value in each)
    parts = []
    for place, way in enumerate(speeds):
        y, ours = 58 + 30 * place, " class='ours'" if way.startswith("fxopt") else ""
        parts.append(f"<text x='190' y='{y + 5}' text-anchor='end'>{way}</text>")
        parts.append(f"<rect{ours} x='200' y='{y - 9}' width='{means[way] * scale:.0f}' height='18' rx='3'/>")
        parts += [f"<circle cx='{200 + speed * scale:.0f}' cy='{y}' r='2.5'/>" for speed in speeds[way]]
        cosine = min(kept[way])
        parts.append(f"<text x='640' y='{y + 5}'>{means[way]:.2f} x, cosine {cosine:.3f}</text>")
    height, count = 60 + 30 * len(speeds), len(charted(results))
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 800 {height}' font-family='sans-serif' font-size='13'>\n"
        "<style>text{fill:#24292f} rect{fill:#9aa4ae} .ours{fill:#2da44e} circle{fill:#24292f;opacity:.55} "
        "@media(prefers-color-scheme:dark){text{fill:#d0d7de} circle{fill:#d0d7de}}</style>\n"
        "<text x='200' y='20' font-weight='bold'>Texts a second, times torch float32</text>\n"
        f"<text x='200' y='38'>bar: mean of {count} models and lengths (dots); least mean cosine</text>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


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
