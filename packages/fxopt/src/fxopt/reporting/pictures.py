"""`picture`: a graph, and what passes changed in it, to be written as text, Mermaid, DOT or SVG."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torch import nn
from torch.fx import GraphModule

from fxopt.reporting.changes import Changes, DrawnSite, Status, changes_between
from fxopt.reporting.drawn import DrawnGraph, DrawnNode
from fxopt.reporting.rewinding import graph_before
from fxopt_core import PreconditionError
from fxopt_core.checks import check_graph_module

Side = Literal["both", "before", "after"]


@dataclass(frozen=True, repr=False)
class Picture:
    """Two graphs, before and after passes, and what is different between them.

    ``print`` shows what changed as text; a notebook shows it as a drawing.

    Attributes:
        after: the graph as it is now.
        before: the graph before all passes that are applied; None where nothing tells it.
        changes: which nodes are gone, new or others, and the sites that the passes rewrote and refused.
        notes: what a reader has to know of it.
    """

    after: DrawnGraph
    before: DrawnGraph | None
    changes: Changes = field(repr=False)
    notes: tuple[str, ...] = ()

    def to_text(self, context: int | None = 1) -> str:
        """Return the nodes as lines: ``-`` before those that are gone, ``+`` before new ones, ``~`` before others.

        Args:
            context: how many edges away from a change nodes are shown still; None for all nodes.

        Raises:
            PreconditionError: The context is no number of edges.

        >>> import torch
        >>> from fxopt_core import LintAndRecompile
        >>> print(picture(torch.fx.symbolic_trace(torch.nn.ReLU())).to_text(context=None))
          input_1  input
          relu     torch.nn.functional.relu  %input_1, inplace=False
          output   output                    %relu
        """
        from fxopt.reporting.text import picture_text

        return picture_text(self, context)

    def to_mermaid(self, context: int | None = 1, *, most_edges: int = 400) -> str:
        """Return a Mermaid flowchart, which GitHub and others show in Markdown within a block of language ``mermaid``.

        Args:
            context: how many edges away from a change nodes are shown still; None for all nodes.
            most_edges: how many edges to draw at most: viewers refuse charts of more than 500. Nodes beyond are left
                out, and a node says how many.

        Raises:
            PreconditionError: The context is no number of edges.
        """
        from fxopt.reporting.mermaid import picture_mermaid

        return picture_mermaid(self, context, most_edges)

    def to_dot(self, context: int | None = None) -> str:
        """Return a graph in the language of Graphviz.

        Args:
            context: how many edges away from a change nodes are shown still; None for all nodes.

        Raises:
            PreconditionError: The context is no number of edges.
        """
        from fxopt.reporting.dot import picture_dot

        return picture_dot(self, context)

    def to_svg(self, context: int | None = 1) -> str:
        """Return a drawing of both graphs in one, without scripts.

        Args:
            context: how many edges away from a change nodes are shown still; None for all nodes.

        Raises:
            PreconditionError: The context is no number of edges.
        """
        from fxopt.reporting.svg import picture_svg

        return picture_svg(self, context)

    def __str__(self) -> str:
        """Return what changed as text."""
        return self.to_text()

    def __repr__(self) -> str:
        """Return how large it is."""
        before = "unknown" if self.before is None else len(self.before.nodes)
        return f"<picture of {before} nodes before and {len(self.after.nodes)} after>"

    def _repr_html_(self) -> str:
        """Return the drawing of what changed for a notebook, or the text where that would be large."""
        from fxopt.reporting.svg import notebook_picture

        return notebook_picture(self)

    @property
    def rewritten(self) -> tuple[DrawnSite, ...]:
        """The sites that were rewritten and are so now."""
        sites = self.changes.sites
        return tuple(site for site in sites if site.rewritten and site.record.state == "applied")

    @property
    def refused(self) -> tuple[DrawnSite, ...]:
        """The sites that were refused."""
        return tuple(site for site in self.changes.sites if not site.rewritten)

    def node(self, name: str) -> DrawnNode:
        """Return the node of this name: that of the graph after, or of the graph before where that has none."""
        found = self.after.nodes.get(name)
        if found is None and self.before is not None:
            found = self.before.nodes.get(name)
        if found is None:
            raise PreconditionError(f"there is no node `{name}` in the picture")
        return found

    def status(self, name: str) -> Status:
        """Return what became of the node of this name."""
        return self.changes.after[name] if name in self.changes.after else self.changes.before.get(name, "kept")

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The names of the nodes of both graphs in one order: those that are gone before new ones."""
        waiting: dict[str, list[str]] = {}
        gone: list[str] = []
        for name in self.before.nodes if self.before is not None else ():
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
        found: dict[tuple[str, str], Side] = {}
        for edge in self.before.edges() if self.before is not None else ():
            found[edge] = "before"
        for edge in self.after.edges():
            found[edge] = "both" if edge in found or self.before is None else "after"
        return found

    def near(self, context: int | None) -> tuple[str, ...]:
        """Return the names of the nodes within so many edges of a change or a refusal, in order; all for None.

        Raises:
            PreconditionError: The context is no number of edges.
        """
        if context is None:
            return self.order
        if type(context) is not int or context < 0:
            raise PreconditionError(f"context is {context!r}, expected a number of edges, or None for the whole graph")
        refused = self.changes.refused
        found = {name for name in self.order if self.status(name) != "kept" or name in refused}
        border: Iterable[str] = found
        beside = self._beside() if context else {}
        for _ in range(context):
            border = {each for name in border for each in beside.get(name, ())} - found
            found |= border
        return tuple(name for name in self.order if name in found)

    def _beside(self) -> dict[str, list[str]]:
        beside: dict[str, list[str]] = {}
        for one, other in self.edges:
            beside.setdefault(one, []).append(other)
            beside.setdefault(other, []).append(one)
        return beside

    def edges_among(self, names: Iterable[str]) -> Iterator[tuple[str, str, Side]]:
        """Yield the edges between nodes of these names."""
        inside = set(names)
        for (one, other), side in self.edges.items():
            if one in inside and other in inside:
                yield one, other, side


def picture(graph_module: GraphModule, original: nn.Module | None = None) -> Picture:
    """Return a picture of a graph module, and of what passes changed in it.

    Args:
        graph_module: the transformed graph module; it is read only.
        original: the graph module before the passes. Without it, or where it has no graph, the graph before is read
            from the ledger, which knows it unless a pass edited the graph by its own means.

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
    if isinstance(original, GraphModule):
        before = DrawnGraph.of(original)
    else:
        before, notes = graph_before(graph_module)
    return Picture(after, before, changes_between(before, after, graph_module), notes)
