"""A picture as a drawing of both graphs in one, without scripts, for notebooks and documents."""

from __future__ import annotations

from collections.abc import Sequence

from fxopt_report.comparison import Comparison
from fxopt_report.drawing_data import caption_of, is_tensor, label_of, width_of
from fxopt_report.markup import Html, tag
from fxopt_report.places import NODE_HEIGHT, lay_out
from fxopt_report.rows import shared_rows

_SIGNS = {"removed": "−", "added": "+", "changed": "~", "refused": "!"}
_COLOURS = {
    "kept": ("#f6f8fa", "#8c959f", "#1f2328"),
    "removed": ("#ffebe9", "#cf222e", "#82071e"),
    "added": ("#dafbe1", "#1a7f37", "#0f4d22"),
    "changed": ("#fff8c5", "#9a6700", "#4d2d00"),
    "refused": ("#f6f8fa", "#8250df", "#1f2328"),
}
_DASHES = {"removed": "5 3", "refused": "2 2.5"}
_FONT = "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
_CODE_FONT = "ui-monospace, Menlo, Consolas, monospace"
_SIGN_FONT = {"font_size": "13", "font_weight": "700", "text_anchor": "end"}
_EDGES = {"both": ("#8c959f", None), "before": ("#cf222e", "5 3"), "after": ("#1a7f37", None)}


def picture_svg(picture: Comparison, context: int | None) -> str:
    """Return the drawing; on white paper, so that its colours do not depend on the page around it."""
    names = picture.near(context)
    edges = {(one, other): side for one, other, side in picture.edges_among(names)}
    tensors = frozenset(name for name in names if is_tensor(picture.node(name)))
    (rows,) = shared_rows(names, list(edges), tensors, [dict.fromkeys(names)])
    layout = lay_out(_packed(rows), list(edges), {name: width_of(picture.node(name)) for name in names})
    lines = (_edge(points, edges[edge]) for edge, points in layout.paths.items())
    nodes = (_node(picture, name, *place) for name, place in layout.places.items())
    width, height = layout.width + 20, layout.height + 20
    paper = tag("rect", x=-10, y=-10, width=f"{width:.0f}", height=f"{height:.0f}", rx=6, fill="#ffffff")
    size = {"width": f"{width:.0f}", "height": f"{height:.0f}", "viewBox": f"-10 -10 {width:.0f} {height:.0f}"}
    label = f"{len(names)} nodes of a graph, changed ones in colour"
    namespace = "http://www.w3.org/2000/svg"
    return tag("svg", paper, lines, nodes, xmlns=namespace, **size, role="img", aria_label=label, font_family=_FONT)


def _packed(rows: dict[str, int]) -> dict[str, int]:
    """Return rows without gaps, except for one empty row where nodes were left out."""
    packed: dict[int, int] = {}
    last = former = -1
    for row in sorted(set(rows.values())):
        last += 1 if not packed or row == former + 1 else 2
        packed[row], former = last, row
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


def _node(picture: Comparison, name: str, x: float, y: float) -> Html:
    node, status = picture.node(name), str(picture.status(name))
    if status == "kept" and name in picture.changes.refused:
        status = "refused"
    fill, line, ink = _COLOURS[status]
    width, caption = width_of(node), caption_of(node)
    border = {"stroke": line, "stroke_width": "1.3", "stroke_dasharray": _DASHES.get(status)}
    return tag(
        "g",
        tag("title", f"{node.name}\n{node.module or node.target}"),
        tag("rect", width=width, height=NODE_HEIGHT, rx=6, fill=fill, **border),
        tag("text", label_of(node), x=12, y=17 if caption else 24, fill=ink, font_size="12.5", font_weight="600"),
        tag("text", caption, x=12, y=32, fill=ink, font_size="11", font_family=_CODE_FONT) if caption else None,
        tag("text", _SIGNS[status], x=width - 7, y=16, fill=line, **_SIGN_FONT) if status in _SIGNS else None,
        transform=f"translate({x - width / 2:.1f} {y - NODE_HEIGHT / 2:.1f})",
        class_=status,
    )
