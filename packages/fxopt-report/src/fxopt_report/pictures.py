"""`picture`: a graph before and after passes, and what they changed in it, as data and as SVG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torch import nn
from torch.fx import GraphModule

from fxopt_core import check_graph_module
from fxopt_report.changes import Changes, DrawnSite, Status, changes_between
from fxopt_report.drawn import DrawnGraph, DrawnNode
from fxopt_report.graph_before import graph_before
from fxopt_report.markup import Html, tag
from fxopt_report.places import NODE_HEIGHT, lay_out
from fxopt_report.rows import shared_rows

Side = Literal["both", "before", "after"]
Kinds = tuple[tuple[str, int, int], ...]
_MOST = 400  # nodes that a notebook draws
#: Signs and dashes repeat the colours, for readers who cannot tell colours apart.
_SIGNS = {"removed": "−", "added": "+", "changed": "~", "refused": "!"}
#: Fill, border and text of a node, by its status.
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


@dataclass(frozen=True, repr=False)
class Picture:
    """Two graphs, before and after passes, and their differences; a notebook shows what changed as a drawing.

    Attributes:
        after: the graph as it is now.
        before: the graph before all applied passes; None where it is not known.
        changes: which nodes are gone, new or changed, and the sites that the passes rewrote and refused.
        notes: remarks for the reader.
    """

    after: DrawnGraph
    before: DrawnGraph | None
    changes: Changes = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def former(self) -> Mapping[str, DrawnNode]:
        """The nodes of the graph before by name; none where it is not known."""
        return {} if self.before is None else self.before.nodes

    @property
    def rewritten(self) -> tuple[DrawnSite, ...]:
        """The sites whose rewrites are applied."""
        return tuple(site for site in self.changes.sites if site.rewritten and site.record.state == "applied")

    @property
    def refused(self) -> tuple[DrawnSite, ...]:
        """The sites that were refused."""
        return tuple(site for site in self.changes.sites if not site.rewritten)

    @cached_property
    def kinds(self) -> Kinds:
        """The kinds of operations with their numbers before and after: layers first, then by difference.

        It is empty where the graph before is not known.
        """
        if self.before is None:
            return ()
        graphs = [
            [node for node in graph.nodes.values() if node.category in ("module", "function")]
            for graph in (self.before, self.after)
        ]
        layers = {node.label for nodes in graphs for node in nodes if node.category == "module"}
        old, new = (Counter(node.label for node in nodes) for nodes in graphs)
        rows = [(kind, old[kind], new[kind]) for kind in {**old, **new}]
        return tuple(sorted(rows, key=lambda row: (row[0] not in layers, -abs(row[2] - row[1]))))

    def node(self, name: str) -> DrawnNode:
        """Return the node of this name in the graph after, or else in the graph before."""
        return self.after.nodes.get(name) or self.former[name]

    def status(self, name: str) -> Status:
        """Return what became of the node of this name."""
        return self.changes.after[name] if name in self.changes.after else self.changes.before.get(name, "kept")

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The names of the nodes of both graphs in one order; nodes that are gone come before new ones."""
        # For each node that both graphs have, the removed nodes directly before it.
        waiting: dict[str, list[str]] = {}
        gone: list[str] = []
        for name in self.former:
            if name in self.after.nodes:
                waiting[name], gone = gone, []
            else:
                gone.append(name)
        found: list[str] = []
        new: list[str] = []
        for name in self.after.nodes:
            if name in waiting:
                found += [*waiting[name], *new, name]
                new = []
            else:
                new.append(name)
        return (*found, *gone, *new)

    @cached_property
    def edges(self) -> dict[tuple[str, str], Side]:
        """The edges of both graphs by the names at their ends, each with the graphs that have it."""
        found: dict[tuple[str, str], Side] = dict.fromkeys(self.before.edges() if self.before else (), "before")
        for edge in self.after.edges():
            found[edge] = "both" if edge in found or self.before is None else "after"
        return found

    def near(self, context: int | None) -> tuple[str, ...]:
        """Return the names of the nodes within so many edges of a change or a refusal, in order; all for None."""
        if context is None:
            return self.order
        refused = self.changes.refused
        found = {name for name in self.order if self.status(name) != "kept" or name in refused}
        for _ in range(context):
            found |= {name for edge in self.edges if not found.isdisjoint(edge) for name in edge}
        return tuple(name for name in self.order if name in found)

    def to_svg(self, context: int | None = 1) -> str:
        """Return a drawing of both graphs in one, without scripts.

        It is on white paper, so that its colours do not depend on the page around it.

        Args:
            context: how many edges away from a change nodes are still shown; None for all nodes.
        """
        names = dict.fromkeys(self.near(context))
        edges = {edge: side for edge, side in self.edges.items() if edge[0] in names and edge[1] in names}
        tensors = frozenset(name for name in names if self.node(name).is_tensor)
        (rows,) = shared_rows([*names], [*edges], tensors, [names])
        layout = lay_out(rows, edges, {name: self.node(name).width for name in names})
        lines = (_edge(points, edges[edge]) for edge, points in layout.paths.items())
        nodes = (self._drawn(name, *place) for name, place in layout.places.items())
        width, height = f"{layout.width + 20:.0f}", f"{layout.height + 20:.0f}"
        paper = tag("rect", x=-10, y=-10, width=width, height=height, rx=6, fill="#ffffff")
        size = {"width": width, "height": height, "viewBox": f"-10 -10 {width} {height}", "font_family": _FONT}
        label = f"{len(names)} nodes of a graph, changed ones in colour"
        return tag("svg", paper, lines, nodes, xmlns="http://www.w3.org/2000/svg", **size, role="img", aria_label=label)

    def _drawn(self, name: str, x: float, y: float) -> Html:
        node, status = self.node(name), str(self.status(name))
        if status == "kept" and name in self.changes.refused:
            status = "refused"
        fill, line, ink = _COLOURS[status]
        label, caption = node.lines
        border = {"stroke": line, "stroke_width": "1.3", "stroke_dasharray": _DASHES.get(status)}
        return tag(
            "g",
            tag("title", f"{node.name}\n{node.module or node.target}"),
            tag("rect", width=node.width, height=NODE_HEIGHT, rx=6, fill=fill, **border),
            tag("text", label, x=12, y=17 if caption else 24, fill=ink, font_size="12.5", font_weight="600"),
            tag("text", caption, x=12, y=32, fill=ink, font_size="11", font_family=_CODE_FONT) if caption else None,
            tag("text", _SIGNS[status], x=node.width - 7, y=16, fill=line, **_SIGN_FONT) if status in _SIGNS else None,
            transform=f"translate({x - node.width / 2:.1f} {y - NODE_HEIGHT / 2:.1f})",
            class_=status,
        )

    def __repr__(self) -> str:
        """Return the sizes of the graphs."""
        before = "unknown" if self.before is None else len(self.before.nodes)
        return f"<picture of {before} nodes before and {len(self.after.nodes)} after>"

    def _repr_html_(self) -> str:
        """Return a drawing of what changed for a notebook; a line where nothing did, or too much to draw."""
        shown = len(self.near(1))
        if not 0 < shown <= _MOST:
            what = f"{shown} nodes to draw: write a report, or draw them with to_svg()" if shown else "nothing changed"
            return tag("p", what)
        notes = "".join(tag("p", note) for note in self.notes)
        return f'<div style="max-height:640px;overflow:auto">{self.to_svg()}{notes}</div>'


def _edge(points: Sequence[tuple[float, float]], side: Side) -> Html:
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


def picture(graph_module: GraphModule, original: nn.Module | None = None) -> Picture:
    """Return a picture of a graph module, and of what passes changed in it.

    Args:
        graph_module: the transformed graph module, which is not changed.
        original: the graph module before the passes. Otherwise, the graph before is read from the ledger, which has it
            unless a pass edited the graph directly.

    Raises:
        PreconditionError: There is no graph.

    >>> import torch
    >>> picture(torch.fx.symbolic_trace(torch.nn.ReLU()))
    <picture of 3 nodes before and 3 after>
    """
    check_graph_module(graph_module, "picture")
    after = DrawnGraph.of(graph_module)
    before, notes = (DrawnGraph.of(original), ()) if isinstance(original, GraphModule) else graph_before(graph_module)
    return Picture(after, before, changes_between(before, after, graph_module), notes)
