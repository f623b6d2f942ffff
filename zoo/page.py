"""The page of the zoo, made from its file of results."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from zoo.results import ORDER, exportable, outcome
from zoo.trial import Row
from zoo.variations import MODALITIES, VARIED

PAGE = Path(__file__).parent.parent / "docs" / "zoo.md"
KINDS = {"transformers": "Base models of transformers", "timm": "Modules of timm", "heads": "Models with heads"}
BEGIN = """# The zoo: every architecture of transformers and timm

`nox -s zoo` builds a small model of each architecture (the library's default configuration with small sizes, random
weights, and inputs made from the names of its arguments) and tries everything that fxopt offers on it: capture,
comparison on the example and at other sizes, the exact pipelines and their undo, saving and loading, and whether the
caller's model stays as it was. This page shows the latest results; `nox -s zoo` fails if a model got worse.

*Not built*: the zoo found no small configuration or no inputs, which says nothing about capture. *Refused*: a
`CaptureError`, or a limit of time or memory on the machine that ran the zoo. *Wrong*: anything else, such as other
values, an error after a successful capture, or a changed model. At other sizes, a graph may refuse with a
`CaptureError`, but must never compute something else.

The tables leave out `heads/DFineForObjectDetection`. With random weights, it selects 300 of 1,029 proposals by scores
that are equal up to rounding; after `inference`, it selects others, and the comparison fails.
"""


def page(rows: Mapping[str, Row], known: Mapping[str, int]) -> str:
    """Return the page of rows, of as many models of each kind as are known."""
    kinds = {kind: [row for row in rows.values() if row["name"].startswith(f"{kind}/")] for kind in KINDS}
    parts = [BEGIN, _summary(kinds, known), _tried(kinds), _slow([*rows.values()]), _refusals(rows.values())]
    parts += [_kind(title, kinds[kind]) for kind, title in KINDS.items()]
    return "\n".join(parts)


def _table(header: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    names = list(header)
    body = [f"| {' | '.join(map(str, line))} |" for line in lines]
    return "\n".join([f"| {' | '.join(names)} |", f"|{'---|' * len(names)}", *body, ""])


def _cell(value: object) -> str:
    return re.sub(r"([|<*`\[]|__)", r"\\\1", str(value))


def _code(name: object) -> str:
    return f"`{name}`"


def _summary(kinds: Mapping[str, list[Row]], known: Mapping[str, int]) -> str:
    last = ("refused, yet torch.export takes it", "same at other sizes", "saved and loaded")
    header = ("", "there are", "tried", *ORDER, *last)
    lines = []
    for kind, rows in kinds.items():
        counts = Counter(map(outcome, rows))
        captured = [row for row in rows if outcome(row) == "captured"]
        sizes = Counter("equal" if "equal" in row.get("sizes", []) else "" for row in captured)
        refused = sum(outcome(row) == "refused" and exportable(row) for row in rows)
        saved = sum("save" in row["seconds"] and "unsaved" not in row for row in captured)
        lines.append(
            (KINDS[kind], known[kind], len(rows), *(counts[each] for each in ORDER), refused, sizes["equal"], saved)
        )
    tried = [row for rows in kinds.values() for row in rows]
    stopped = [_code(row["name"]) for row in tried if outcome(row) == "captured" and row["problems"]]
    text = (
        f"\nCaptured, but a later step reached a limit, {len(stopped)}: {', '.join(sorted(stopped))}.\n"
        if stopped
        else ""
    )
    uncached = sorted(_code(row["name"]) for row in tried if "uncached" in row)
    text += (
        f"\nCaptured without the cache that the model makes, as `capture` warns: {', '.join(uncached)}.\n"
        if uncached
        else ""
    )
    return f"## What works\n\n{_table(header, lines)}{text}"


def _tried(kinds: Mapping[str, list[Row]]) -> str:
    header = [
        "",
        "models",
        *(f"with {each}" for each in MODALITIES),
        "without their images or sounds",
        *VARIED.values(),
        "weights",
    ]
    lines, without = [], []
    for kind, rows in kinds.items():
        built = [row for row in rows if "modalities" in row]
        shares = [row["weights"] for row in built if row["weights"] is not None]
        without += [_code(row["name"]) for row in built if row["left_out"]]
        counts = [sum(each in row["modalities"] for row in built) for each in MODALITIES]
        varied = [_varied(built, each) for each in VARIED]
        reached = f"{sum(share >= 0.9 for share in shares)} of {len(shares)}"
        lines.append((KINDS[kind], len(built), *counts, sum(bool(row["left_out"]) for row in built), *varied, reached))
    text = (
        "## What was tried\n\nModels by kinds of inputs. *Other lengths* and the next four columns: of the trials with "
        "such inputs that the model itself takes, how many give the same results in the captured and the optimized "
        "graph; in the rest, the graph refuses. *Weights*: models of whose weights at least nine tenths are in tensors "
        "that change the outputs, so that a mistake in them would show.\n\n"
    )
    names = f"\nTried without the images or sounds that they take: {', '.join(sorted(without))}.\n" if without else ""
    return text + _table(header, lines) + names


def _varied(rows: Iterable[Row], kind: str) -> str:
    found = [outcome for row in rows for each, outcome in zip(row.get("varied", ()), row.get("sizes", ()), strict=False)
             if each == kind]  # fmt: skip
    taken = len(found) - found.count("model")
    return f"{found.count('equal')} of {taken}" if taken else ""


def _slow(rows: list[Row]) -> str:
    both = [row for row in rows if outcome(row) == "captured" and exportable(row)]
    ratios = [row["seconds"]["capture"] / max(row["seconds"]["export"], 0.01) for row in both]
    slowest = sorted(rows, key=lambda row: -float(row["seconds"].get("capture", 0)))[:10]
    lines = [(_code(row["name"]), row.get("nodes", ""), row["seconds"]["capture"], row["seconds"].get("export", ""))
             for row in slowest if "capture" in row["seconds"]]  # fmt: skip
    text = (
        f"The median ratio of {len(ratios)} models is {statistics.median(ratios):.2f}.\n" if len(ratios) >= 10 else ""
    )
    return (
        "## The slowest\n\nSeconds for `capture`, including its comparison with the model, and for "
        f"`torch.export.export` alone, which runs later in the same process and so is warmer. The machine was busy. "
        f"{text}\n{_table(('model', 'nodes', 'capture', 'export'), lines)}"
    )


def _refusals(rows: Iterable[Row]) -> str:
    sites: Counter[str] = Counter()
    models: Counter[str] = Counter()
    for row in rows:
        sites.update(row.get("refusals", {}))
        models.update(set(row.get("refusals", {})))
    lines = [(*map(_code, name.split(": ")), number, models[name]) for name, number in sites.most_common(20)]
    return (
        "## What passes leave alone\n\nRefusals in the whole zoo; [Refusals](refusals.md) explains the reasons.\n\n"
        + _table(("pass", "reason", "sites", "models"), lines)
    )


def _kind(title: str, rows: list[Row]) -> str:
    ordered = sorted(rows, key=lambda row: str(row["name"]))
    works = [row["name"].partition("/")[2] for row in ordered if outcome(row) == "captured"]
    others = [(_code(row["name"].partition("/")[2]), outcome(row), _cell(_reason(row)), row["since"]) for row in ordered
              if outcome(row) != "captured"]  # fmt: skip
    text = f"## {title}\n\nCaptured, {len(works)}: {', '.join(map(_code, works))}.\n"
    return text + ("\n" + _table(("model", "outcome", "why", "since"), others) if others else "")


def _reason(row: Row) -> str:
    problems = "; ".join(f"{step}: {text}" for step, text in row["problems"].items())
    refused = " ".join(row["refused"]) if "refused" in row else ""
    taken = " (torch.export takes it)" if outcome(row) == "refused" and exportable(row) else ""
    return (refused or problems)[:240] + taken
