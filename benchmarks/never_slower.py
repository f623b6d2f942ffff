"""Whether a pipeline for CPUs makes a model slower: many models in all of them, and those that get slower."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import fxopt
from benchmarks import varied
from benchmarks.plans import LEAST, cells, measured
from benchmarks.suite import Absent, Cell, Measured, Row, Settings, Table

TEXT = """{count} models, one call each. {note} Each cell has a process of its own, and is verified before it is \
timed. Listed are those with less than {least:g} times the speed of eager, or with wrong results or an error; a value \
whose quartiles are more than 15 % of it apart is not shown. Of {values} speeds, {shown} are steady; the \
least is {lowest}."""


def tables(settings: Settings) -> Iterator[Table]:
    """One table with one thread: a row for each model that gets slower, the worst first."""
    ways = {name: name for name in fxopt.registry().pipelines() if name.startswith("cpu-inference")}
    kinds = varied.QUICK if settings.quick else {**varied.PLANS, "More": varied.MORE}
    labels = [label for makers in kinds.values() for label in makers if settings.wants(label)]
    given = replace(settings, threads=1, rounds=settings.fewer_rounds(10))
    rows = [Row(label, cells(measured(label, ways, given))) for label in labels]
    speeds = [cell for row in rows for cell in row.cells[1:]]
    steady = [cell.median for cell in speeds if isinstance(cell, Measured)]
    text = TEXT.format(
        count=len(rows), note=given.note, least=LEAST, values=len(speeds), shown=len(steady),
        lowest=f"{min(steady):.2f}" if steady else "not known",
    )  # fmt: skip
    losing = sorted((row for row in rows if least(row.cells[1:]) < LEAST), key=lambda row: least(row.cells[1:]))
    yield Table("Slower than eager", ("", "eager, 1 call", *ways), tuple(losing), text)


def least(speeds: Iterable[Cell]) -> float:
    """Return the least of some speeds: 0 where there is an error; unsteady values do not count.

    >>> least([Measured(1.2, "x"), Absent("spread 20%")]), least([Absent("wrong results")]), least([])
    (1.2, 0.0, inf)
    """
    known = (cell for cell in speeds if not (isinstance(cell, Absent) and cell.reason.startswith("spread")))
    return min((cell.median if isinstance(cell, Measured) else 0.0 for cell in known), default=math.inf)
