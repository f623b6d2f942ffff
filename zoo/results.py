"""Results of the models: in one file, one line for each, and compared with a former file."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from zoo.trial import Row

FILE = Path(__file__).parent.parent / "docs" / "benchmarks" / "zoo.json"
LIMIT = "limit of time or memory"
"""Reasons why a trial ended without a result, which are not mistakes."""
ORDER = ("captured", "refused", "wrong", "not built")
"""The outcomes."""


def outcome(row: Row) -> str:
    """Return the outcome of a trial.

    >>> outcome({"problems": {}}), outcome({"problems": {}, "refused": ["capture", "CaptureError", "no"]})
    ('captured', 'refused')
    """
    step, kind, _ = row.get("refused", ("", "", ""))
    if step == "build":
        return "not built"
    if any(problem != LIMIT for problem in row["problems"].values()):
        return "wrong"
    if step:
        return "refused" if kind in ("CaptureError", LIMIT) else "wrong"
    return "captured"


def exportable(row: Row) -> bool:
    """Whether `torch.export` takes the model that `capture` has refused."""
    return "export" not in row and "export" in row["seconds"]


def read(path: Path = FILE) -> dict[str, Row]:
    """Read the rows by name; none where there is no file."""
    if not path.exists():
        return {}
    return {row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))["models"]}


def read_known(path: Path = FILE) -> dict[str, int]:
    """Read how many models there are of each kind, tried or not."""
    known: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))["known"]
    return known


def write(rows: Iterable[Row], known: Mapping[str, int], path: Path = FILE) -> None:
    """Write rows over those of the same names; where an outcome is as before, the day since which it holds is kept.

    `known` is how many models there are of each kind, tried or not.
    """
    stored, today = read(path), datetime.date.today().isoformat()
    for row in rows:
        former = stored.get(row["name"])
        is_as_before = former is not None and outcome(former) == outcome(row)
        stored[row["name"]] = {**row, "since": former["since"] if former and is_as_before else today}
    text = ",\n".join(json.dumps(stored[name], ensure_ascii=False) for name in sorted(stored))
    path.write_text(f'{{"known": {json.dumps(known)}, "models": [\n{text}\n]}}\n', encoding="utf-8")


def worse(stored: Mapping[str, Row], rows: Iterable[Row]) -> list[str]:
    """Return what got worse, model by model."""
    found = []
    for row in rows:
        former = stored.get(row["name"])
        new = [
            f"{step}: {text}" for step, text in row["problems"].items() if not former or step not in former["problems"]
        ]
        if former and outcome(former) == "captured" and outcome(row) not in ("captured", "wrong"):
            new.append(" ".join(row["refused"]))
        if former and former.get("sizes", []).count("equal") > row.get("sizes", []).count("equal") and not new:
            new.append(f"other sizes: {former['sizes']} before, {row.get('sizes')} now")
        found += [f"{row['name']}: {reason}" for reason in new]
    return found
