"""A picture as a drawing without scripts: both graphs in one, for notebooks and documents."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from fxopt.reporting.drawing import caption_of, label_of, width_of
from fxopt.reporting.layering import shared_rows
from fxopt.reporting.layout import NODE_HEIGHT, lay_out
from fxopt.reporting.markup import Html, tag
from fxopt.reporting.pictures import Picture

_MOST = 400
_SIGNS = {"removed": "−", "added": "+", "changed": "~", "refused": "!"}
_COLOURS = {
    "kept": ("#f6f8fa", "#8c959f", "#1f2328"),
    "removed": ("#ffebe9", "#cf222e", "#82071e"),
    "added": ("#dafbe1", "#1a7f37", "#0f4d22"),
    "changed": ("#fff8c5", "#9a6700", "#4d2d00"),
    "refused": ("#f6f8fa", "#8250df", "#1f2328"),
}
_EDGES = {"both": ("#8c959f", None), "before": ("#cf222e", "5 3"), "after": ("#1a7f37", None)}


def picture_svg(picture: Picture, context: int | None) -> str:
    """Return the drawing; all of its colours stand on white, whatever is behind it."""
    names = picture.near(context)
    edges = {(one, other): side for one, other, side in picture.edges_among(names)}
    tensors = frozenset(
        n for n in names if not (node := picture.node(n)).inputs and node.category not in ("input", "output")
    )
    (rows,) = shared_rows(names, list(edges), tensors, [dict.fromkeys(names)])
    layout = lay_out(_packed(rows), list(edges), {name: width_of(picture.node(name)) for name in names})
    lines = (_edge(points, edges[edge]) for edge, points in layout.paths.items())
    nodes = (_node(picture, name, *place) for name, place in layout.places.items())
    width, height = layout.width + 20, layout.height + 20
    paper = tag("rect", x=-10, y=-10, width=f"{width:.0f}", height=f"{height:.0f}", rx=6, fill="#ffffff")
    return tag(
        "svg",
        paper,
        lines,
        nodes,
        xmlns="http://www.w3.org/2000/svg",
        width=f"{width:.0f}",
        height=f"{height:.0f}",
        viewBox=f"-10 -10 {width:.0f} {height:.0f}",
        role="img",
        aria_label=f"{len(names)} nodes of a graph, changed ones in colour",
        font_family="system-ui, 'Segoe UI', Helvetica, Arial, sans-serif",
    )


def notebook_picture(picture: Picture) -> str:
    """Return what changed as a drawing in a box that scrolls; as text where that is too large to draw."""
    names = picture.near(1)
    if not names or len(names) > _MOST:
        return f"<pre>{html.escape(str(picture))}</pre>"
    notes = "".join(tag("p", note) for note in picture.notes)
    return f'<div style="max-height:640px;overflow:auto">{picture.to_svg()}{notes}</div>'


def _packed(rows: dict[str, int]) -> dict[str, int]:
    """Return rows without those that are empty, but one where there are any: so much was left out."""
    used = sorted(set(rows.values()))
    packed: dict[int, int] = {}
    last = 0
    for place, row in enumerate(used):
        last = (packed[used[place - 1]] + (1 if row == used[place - 1] + 1 else 2)) if place else 0
        packed[row] = last
    return {name: packed[row] for name, row in rows.items()}


def _edge(points: Sequence[tuple[float, float]], side: str) -> Html:
    colour, dashes = _EDGES[side]
    (x, y), *rest = points
    path = [f"M{x:.1f} {y:.1f}"]
    for to_x, to_y in rest:
        bend = (to_y - y) / 2
        path.append(f"C{x:.1f} {y + bend:.1f} {to_x:.1f} {to_y - bend:.1f} {to_x:.1f} {to_y:.1f}")
        x, y = to_x, to_y
    tip = f"{x - 3:.1f},{y - 5:.1f} {x + 3:.1f},{y - 5:.1f} {x:.1f},{y:.1f}"
    line = tag("path", d="".join(path), fill="none", stroke=colour, stroke_width="1.3", stroke_dasharray=dashes)
    return Html(line + tag("polygon", points=tip, fill=colour))


def _node(picture: Picture, name: str, x: float, y: float) -> Html:
    node, status = picture.node(name), str(picture.status(name))
    if status == "kept" and name in picture.changes.refused:
        status = "refused"
    fill, line, text = _COLOURS[status]
    width = width_of(node)
    dashes = {"removed": "5 3", "refused": "2 2.5"}.get(status)
    box = tag(
        "rect",
        width=width,
        height=NODE_HEIGHT,
        rx=6,
        fill=fill,
        stroke=line,
        stroke_width="1.3",
        stroke_dasharray=dashes,
    )
    return tag(
        "g",
        tag("title", f"{node.name}\n{node.module or node.target}"),
        box,
        _texts(label_of(node), caption_of(node), text),
        _sign(status, width, line),
        transform=f"translate({x - width / 2:.1f} {y - NODE_HEIGHT / 2:.1f})",
        class_=status,
    )


def _texts(label: str, caption: str, colour: str) -> Iterator[Html]:
    yield tag("text", label, x=12, y=17 if caption else 24, fill=colour, font_size="12.5", font_weight="600")
    if caption:
        yield tag(
            "text",
            caption,
            x=12,
            y=32,
            fill=colour,
            font_size="11",
            font_family="ui-monospace, Menlo, Consolas, monospace",
        )


def _sign(status: str, width: float, colour: str) -> Html | None:
    if status not in _SIGNS:
        return None
    return tag(
        "text", _SIGNS[status], x=width - 7, y=16, fill=colour, font_size="13", font_weight="700", text_anchor="end"
    )
