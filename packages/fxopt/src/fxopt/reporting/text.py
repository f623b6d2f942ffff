"""A picture as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxopt.reporting.drawn import DrawnNode
from fxopt.reporting.pictures import Picture
from fxopt_tools.tables import text_table

_SIGNS = {"kept": " ", "removed": "-", "added": "+", "changed": "~"}
_WIDEST = 40


def picture_text(picture: Picture, context: int | None) -> str:
    """Return the nodes as lines, with ``...`` where some are left out."""
    shown = picture.near(context)
    notes = [f"note: {note}" for note in picture.notes]
    if not shown:
        return "\n".join(["nothing changed", *notes])
    rows = [row for name in shown for row in _rows(picture, name)]
    lines = iter(text_table([row[1:] for row in rows], widest=_WIDEST))
    signed = [f"{row[0]} {next(lines)}".rstrip() for row in rows]
    places = {name: place for place, name in enumerate(picture.order)}
    return "\n".join([*_with_gaps(picture, shown, [row[1] for row in rows], signed, places), *notes])


def _rows(picture: Picture, name: str) -> Iterator[Sequence[str]]:
    status = picture.status(name)
    now = picture.after.nodes.get(name)
    former = picture.before.nodes.get(name) if picture.before is not None else None
    if status == "changed" and former is not None and now is not None:
        yield _row("-", former)
        yield _row("+", now)
    else:
        sign = "!" if status == "kept" and name in picture.changes.refused else _SIGNS[status]
        yield _row(sign, picture.node(name))


def _row(sign: str, node: DrawnNode) -> tuple[str, ...]:
    label = node.module if node.op == "call_module" and node.module else node.target
    return sign, node.name, node.label if node.op in ("placeholder", "output") else label, node.arguments


def _with_gaps(
    picture: Picture, shown: Sequence[str], names: Sequence[str], lines: Sequence[str], places: dict[str, int]
) -> Iterator[str]:
    """Yield the lines, and between them how many nodes are left out."""
    last = -1
    for name, line in zip(names, lines, strict=True):
        place = places[name]
        yield from _gap(place - last - 1)
        yield line
        last = place
    yield from _gap(len(picture.order) - last - 1)


def _gap(count: int) -> Iterator[str]:
    if count > 0:
        yield f"  ... {count} node{'' if count == 1 else 's'}"
