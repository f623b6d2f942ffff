"""Results as JSON files, one for each topic, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import Facts
from benchmarks.suite import Absent, Cell, Measured, Row, Table

FOLDER = Path(__file__).parent.parent / "docs" / "benchmarks"


@dataclass(frozen=True)
class Results:
    """The results of a topic.

    Attributes:
        topic: its name.
        tables: its tables.
        machine: facts about the machine.
        run: facts about this run: day, rounds, seconds, load before and after, whether it was a quick one.
    """

    topic: str
    tables: tuple[Table, ...]
    machine: Facts
    run: Facts


def write(results: Results, folder: Path = FOLDER) -> Path:
    """Write the results of a topic; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{results.topic}.json"
    tables = [_table_to_json(table) for table in results.tables]
    content = {"topic": results.topic, "run": results.run, "machine": results.machine, "tables": tables}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> Results:
    """Read the results of a topic."""
    content = json.loads(path.read_text(encoding="utf-8"))
    tables = tuple(_table_from_json(table) for table in content["tables"])
    return Results(content["topic"], tables, content["machine"], content["run"])


def read_all(topics: Iterable[str], folder: Path = FOLDER) -> list[Results]:
    """Read all results that exist, in the order of the topics."""
    paths = [folder / f"{topic}.json" for topic in topics]
    return [read(path) for path in paths if path.exists()]


def _table_to_json(table: Table) -> dict[str, object]:
    rows = [[row.label, *map(_cell_to_json, row.cells)] for row in table.rows]
    return {"title": table.title, "text": table.text, "columns": table.columns, "rows": rows}


def _table_from_json(content: Mapping[str, Any]) -> Table:
    rows = tuple(Row(label, tuple(map(_cell_from_json, cells))) for label, *cells in content["rows"])
    return Table(content["title"], tuple(content["columns"]), rows, content["text"])


def _cell_to_json(cell: Cell) -> object:
    if isinstance(cell, Measured):
        return {name: _rounded(value) for name, value in asdict(cell).items() if value is not None}
    return {"absent": cell.reason} if isinstance(cell, Absent) else cell


def _cell_from_json(content: Any) -> Cell:
    if not isinstance(content, dict):
        plain: str | int = content
        return plain
    return Absent(content["absent"]) if "absent" in content else Measured(**content)


def _rounded(value: float | str) -> float | str:
    return value if isinstance(value, str) else float(f"{value:.5g}")
