"""What passes changed between two graphs: which nodes are gone, new or changed, and which replaced which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch.fx import GraphModule

from fxopt_core import Record, iter_nodes, ledger_of, tag_of
from fxopt_report.drawn import DrawnGraph
from fxopt_report.frames import Frame

Status = Literal["kept", "removed", "added", "changed"]
_Names = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class DrawnSite:
    """A site that a pass rewrote or refused.

    Attributes:
        record: the run of the pass that it belongs to.
        site: its readable name.
        rewritten: whether it was rewritten; otherwise it was refused.
        before: names of its nodes in the graph before.
        after: names of its nodes in the graph after.
        was: the modules that were replaced, or the nodes where there are none.
        became: what replaced them.
        reason: stable code of the refusal, or "".
        message: why it was refused, in a sentence, or "".
        frame: the line of the model that it comes from, or None.
    """

    record: Record
    site: str
    rewritten: bool
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    was: tuple[str, ...] = ()
    became: tuple[str, ...] = ()
    reason: str = ""
    message: str = ""
    frame: Frame | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of its nodes in either graph."""
        return tuple(dict.fromkeys((*self.before, *self.after)))


@dataclass(frozen=True)
class Changes:
    """The differences between two graphs.

    Attributes:
        before: status of the nodes before by name: "kept", "removed" or "changed".
        after: status of the nodes after: "kept", "added" or "changed".
        sources: for nodes after that are not kept, the nodes before that they come from.
        results: for nodes before that are not kept, the nodes after that replaced them.
        sites: what the passes rewrote and refused, in order.
    """

    before: Mapping[str, Status]
    after: Mapping[str, Status]
    sources: Mapping[str, tuple[str, ...]]
    results: Mapping[str, tuple[str, ...]]
    sites: tuple[DrawnSite, ...]

    def linked(self, name: str) -> tuple[str, ...]:
        """Return the nodes of the other graph that a node comes from, or that replaced it."""
        found = dict.fromkeys((*self.sources.get(name, ()), *self.results.get(name, ())))
        return tuple(each for each in found if each != name)

    @cached_property
    def refused(self) -> frozenset[str]:
        """Names of the nodes of sites that were refused, in either graph."""
        return frozenset(name for site in self.sites if not site.rewritten for name in site.nodes)


def changes_between(before: DrawnGraph | None, after: DrawnGraph, graph_module: GraphModule) -> Changes:
    """Compare two graphs.

    Args:
        before: the graph before, or None where it is not known.
        after: the graph after.
        graph_module: the source of ``after``, with marks and ledger.
    """
    records = ledger_of(graph_module).records
    applied = [record for record in records if record.state == "applied"]
    made = {node.name: tag.origin[1] for node in iter_nodes(graph_module.graph) if (tag := tag_of(node)).origin}
    former = DrawnGraph({}) if before is None else before
    # `roots` takes the rewrites forwards and `images` backwards, so each one finds what its names already stand for.
    roots = _followed(((each.after, each.before) for record in applied for each in record.rewrites), former)
    images = _followed(((each.before, each.after) for record in applied[::-1] for each in record.rewrites), after)
    ours: dict[str, Status] = {}
    for name, node in former.nodes.items():
        other = after.nodes.get(name)
        ours[name] = "removed" if other is None else "kept" if node.identity == other.identity else "changed"
    theirs: dict[str, Status] = {name: ours.get(name, "added") for name in after.nodes}
    sources: dict[str, tuple[str, ...]] = {}
    # Where the graph before is not known, only the marks of passes tell which nodes are new.
    if before is None:
        theirs = {name: "added" if name in made else "kept" for name in after.nodes}
    else:
        changed = (name for name, status in theirs.items() if status != "kept")
        sources = {name: _sources(name, former, made.get(name, ()), roots) for name in changed}
    results: dict[str, list[str]] = {}
    for name, each in sources.items():
        for source in each:
            results.setdefault(source, []).append(name)
    sites = tuple(site for record in records for site in _sites(record, former, after, roots, images))
    return Changes(ours, theirs, sources, {name: tuple(each) for name, each in results.items()}, sites)


def _followed(steps: Iterable[tuple[Iterable[str], Iterable[str]]], graph: DrawnGraph) -> _Names:
    """Return the nodes of a graph that names stand for, after steps from names to those that stand for them."""
    found: dict[str, tuple[str, ...]] = {}
    for names, others in steps:
        found.update(dict.fromkeys(names, _resolved(others, found, graph)))
    return found


def _resolved(names: Iterable[str], known: _Names, graph: DrawnGraph) -> tuple[str, ...]:
    """Return what names stand for (by default themselves), each once, as far as a graph has these nodes."""
    found = dict.fromkeys(found for name in names for found in known.get(name, (name,)))
    return tuple(name for name in found if name in graph.nodes)


def _sources(name: str, before: DrawnGraph, origin: Iterable[str], roots: _Names) -> tuple[str, ...]:
    """Return the nodes before that a node comes from: by its mark, by the records, or by its name."""
    found = dict.fromkeys(
        source for each in origin for source in ((each,) if each in before.nodes else roots.get(each, ()))
    )
    return tuple(found) or roots.get(name, ()) or ((name,) if name in before.nodes else ())


def _sites(record: Record, before: DrawnGraph, after: DrawnGraph, roots: _Names, images: _Names) -> Iterator[DrawnSite]:
    for rewrite in record.rewrites:
        # The nodes of an undone rewrite are gone, and others may have their names.
        applied = record.state == "applied"
        ours = _resolved(rewrite.before, roots, before) if applied else ()
        theirs = _resolved(rewrite.after, images, after) if applied else ()
        was, became = rewrite.modules_before or rewrite.before, rewrite.modules_after or rewrite.after
        frame = _frame(before, ours) or _frame(after, theirs)
        yield DrawnSite(record, rewrite.site, True, ours, theirs, was, became, frame=frame)
    for refusal in record.refusals:
        ours, theirs = _resolved(refusal.nodes, {}, before), _resolved(refusal.nodes, {}, after)
        reason, message, frame = refusal.reason, refusal.message, _frame(after, theirs) or _frame(before, ours)
        yield DrawnSite(record, refusal.site, False, ours, theirs, reason=reason, message=message, frame=frame)


def _frame(graph: DrawnGraph, names: Iterable[str]) -> Frame | None:
    return next((frame for name in names if (frame := graph.nodes[name].frame) is not None), None)
