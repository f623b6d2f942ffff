"""`picture`: a graph and what passes changed in it, as SVG."""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule

from fxopt_core import check_graph_module
from fxopt_report.changes import changes_between
from fxopt_report.comparison import Comparison
from fxopt_report.drawn import DrawnGraph
from fxopt_report.graph_before import graph_before
from fxopt_report.markup import tag
from fxopt_report.svg import picture_svg

_MOST = 400


class Picture(Comparison):
    """A comparison of two graphs that can be drawn.

    A notebook shows what changed as a drawing.

    Attributes:
        after: the graph as it is now.
        before: the graph before all applied passes; None where it is not known.
        changes: which nodes are gone, new or changed, and the sites that the passes rewrote and refused.
        notes: remarks for the reader.
    """

    def to_svg(self, context: int | None = 1) -> str:
        """Return a drawing of both graphs in one, without scripts.

        Args:
            context: how many edges away from a change nodes are still shown; None for all nodes.

        Raises:
            PreconditionError: The context is not a number of edges.
        """
        return picture_svg(self, context)

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


def picture(graph_module: GraphModule, original: nn.Module | DrawnGraph | None = None) -> Picture:
    """Return a picture of a graph module, and of what passes changed in it.

    Args:
        graph_module: the transformed graph module, which is not changed.
        original: the graph module before the passes, or what `DrawnGraph.of` kept of it. Otherwise, the graph before
            is read from the ledger, which knows it unless a pass edited the graph directly.

    Raises:
        PreconditionError: There is no graph.
        FxoptError: A newer version of fxopt wrote the ledger.

    >>> import torch
    >>> picture(torch.fx.symbolic_trace(torch.nn.ReLU()))
    <picture of 3 nodes before and 3 after>
    """
    check_graph_module(graph_module, "picture")
    after = DrawnGraph.of(graph_module)
    notes: tuple[str, ...] = ()
    before: DrawnGraph | None
    if isinstance(original, (GraphModule, DrawnGraph)):
        before = original if isinstance(original, DrawnGraph) else DrawnGraph.of(original)
    else:
        before, notes = graph_before(graph_module)
    return Picture(after, before, changes_between(before, after, graph_module), notes)
