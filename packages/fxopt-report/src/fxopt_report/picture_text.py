"""A picture as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from fxopt_core import text_table
from fxopt_report.comparison import Comparison
from fxopt_report.drawn import DrawnNode
from fxopt_tools.verification.report import counted

_SIGNS = {"kept": " ", "removed": "-", "added": "+"}
_WIDEST = 40


def picture_text(picture: Comparison, context: int | None) -> str:
    """Return the nodes as lines, and where some are left out, their number."""
    shown = picture.near(context)
    rows = [(name, *row) for name in shown for row in _rows(picture, name)]
    lines = [] if rows else ["nothing changed"]
    places = {name: place for place, name in enumerate(picture.order)}
    last = -1
    for (name, sign, *_), text in zip(rows, text_table([row[2:] for row in rows], widest=_WIDEST), strict=True):
        lines += _gap(places[name] - last - 1)
        lines.append(f"{sign} {text}".rstrip())
        last = places[name]
    if rows:
        lines += _gap(len(picture.order) - last - 1)
    return "\n".join([*lines, *(f"note: {note}" for note in picture.notes)])


def _rows(picture: Comparison, name: str) -> Iterator[tuple[str, ...]]:
    status = picture.status(name)
    if status == "changed" and picture.before is not None:
        yield _row("-", picture.before.nodes[name])
        yield _row("+", picture.after.nodes[name])
    else:
        refused = status == "kept" and name in picture.changes.refused
        yield _row("!" if refused else _SIGNS[status], picture.node(name))


def _row(sign: str, node: DrawnNode) -> tuple[str, ...]:
    label = node.module if node.op == "call_module" and node.module else node.target
    return sign, node.name, node.label if node.op in ("placeholder", "output") else label, node.arguments


def _gap(count: int) -> list[str]:
    return [f"  ... {counted(count, 'node')}"] if count > 0 else []
