"""`Comparison`: two graphs, before and after passes, as writers of pictures read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from fxopt_core import PreconditionError
from fxopt_report.changes import Changes, DrawnSite, Status
from fxopt_report.drawn import DrawnGraph, DrawnNode

Side = Literal["both", "before", "after"]
Kinds = tuple[tuple[str, int, int], ...]
_MOST_KINDS = 6


@dataclass(frozen=True, repr=False)
class Comparison:
    """Two graphs, before and after passes, and their differences.

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
    def rewritten(self) -> tuple[DrawnSite, ...]:
        """The sites whose rewrites are applied."""
        sites = self.changes.sites
        return tuple(site for site in sites if site.rewritten and site.record.state == "applied")

    @property
    def refused(self) -> tuple[DrawnSite, ...]:
        """The sites that were refused."""
        return tuple(site for site in self.changes.sites if not site.rewritten)

    @cached_property
    def kinds(self) -> Kinds:
        """The kinds of operations, as `kinds_between` has them; empty where the graph before is not known."""
        return () if self.before is None else kinds_between(self.before, self.after)

    def node(self, name: str) -> DrawnNode:
        """Return the node of this name in the graph after, or else in the graph before."""
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
        """The names of the nodes of both graphs in one order; nodes that are gone come before new ones."""
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
            PreconditionError: The context is not a number of edges.
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


def kinds_between(before: DrawnGraph, after: DrawnGraph) -> Kinds:
    """Return the kinds of operations with their numbers before and after: layers first, then by difference."""
    nodes = (*before.nodes.values(), *after.nodes.values())
    layers = {node.label for node in nodes if node.category == "module"}
    old, new = before.kinds(), after.kinds()
    rows = [(kind, old[kind], new[kind]) for kind in {**old, **new}]
    return tuple(sorted(rows, key=lambda row: (row[0] not in layers, -abs(row[2] - row[1]))))


def kinds_text(kinds: Kinds) -> str:
    """Return the largest differences in a line, or "unchanged".

    >>> kinds_text((("Linear", 37, 0), ("PanelLinear", 0, 25), ("add", 3, 3)))
    'Linear 37 -> 0, PanelLinear 0 -> 25'
    """
    changed = [f"{kind} {old} -> {new}" for kind, old, new in kinds if old != new]
    more = ["..."] if len(changed) > _MOST_KINDS else []
    return ", ".join([*changed[:_MOST_KINDS], *more]) or "unchanged"
