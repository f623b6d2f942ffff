"""What passes changed between two graphs: which nodes are gone, new or others, and which stand for which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch.fx import GraphModule

from fxopt.reporting.drawn import DrawnGraph
from fxopt.reporting.frames import Frame, model_frame
from fxopt_core import Record, iter_nodes
from fxopt_core.ledger import ledger_of
from fxopt_core.marks import tag_of

Status = Literal["kept", "removed", "added", "changed"]


@dataclass(frozen=True)
class DrawnSite:
    """A site that a pass rewrote or refused.

    Attributes:
        record: the run of the pass that it belongs to.
        site: its readable name.
        rewritten: whether it was rewritten; otherwise it was refused.
        before: names of its nodes in the graph before.
        after: names of its nodes in the graph after.
        was: what was replaced, in a few words: modules, or nodes where there are none.
        became: what stands for it.
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


@dataclass(frozen=True)
class Changes:
    """What is different between two graphs.

    Attributes:
        before: status of the nodes before by name: "kept", "removed" or "changed".
        after: status of the nodes after: "kept", "added" or "changed".
        sources: for nodes after that are not kept, the nodes before that they come from.
        results: for nodes before that are not kept, the nodes after that stand for them.
        sites: what the passes rewrote and refused, in order.
    """

    before: Mapping[str, Status]
    after: Mapping[str, Status]
    sources: Mapping[str, tuple[str, ...]]
    results: Mapping[str, tuple[str, ...]]
    sites: tuple[DrawnSite, ...]

    @property
    def refused(self) -> frozenset[str]:
        """Names of the nodes of sites that were refused, in either graph."""
        return frozenset(name for site in self.sites if not site.rewritten for name in (*site.before, *site.after))


def changes_between(before: DrawnGraph | None, after: DrawnGraph, graph_module: GraphModule) -> Changes:
    """Compare two graphs.

    Args:
        before: the graph before, or None where it is not known.
        after: the graph after.
        graph_module: what ``after`` was made of, with marks and ledger.
    """
    records = [record for record in ledger_of(graph_module).records if record.state == "applied"]
    made = {node.name: _origin(tag.origin) for node in iter_nodes(graph_module.graph) if (tag := tag_of(node)).origin}
    if before is None:
        status: dict[str, Status] = {name: "added" if name in made else "kept" for name in after.nodes}
        roots, images = _roots(records, set()), _images(records, set(after.nodes))
        return Changes({}, status, {}, {}, _sites(ledger_of(graph_module).records, roots, images, None, after))
    ours, theirs = _statuses(before, after)
    roots, images = _roots(records, set(before.nodes)), _images(records, set(after.nodes))
    sources = _sources(before, after, theirs, made, roots)
    results: dict[str, list[str]] = {}
    for name, each in sources.items():
        for source in each:
            results.setdefault(source, []).append(name)
    sites = _sites(ledger_of(graph_module).records, roots, images, before, after)
    return Changes(ours, theirs, sources, {name: tuple(each) for name, each in results.items()}, sites)


def _origin(origin: tuple[str, tuple[str, ...]] | None) -> tuple[str, ...]:
    return origin[1] if origin else ()


def _statuses(before: DrawnGraph, after: DrawnGraph) -> tuple[dict[str, Status], dict[str, Status]]:
    ours: dict[str, Status] = {}
    theirs: dict[str, Status] = {}
    for name, node in before.nodes.items():
        other = after.nodes.get(name)
        if other is None:
            ours[name] = "removed"
        else:
            ours[name] = "kept" if node.identity == other.identity else "changed"
    for name in after.nodes:
        theirs[name] = ours.get(name, "added")
    return ours, theirs


def _roots(records: Iterable[Record], names: set[str]) -> dict[str, tuple[str, ...]]:
    """Return, for nodes that passes made, the nodes of the first graph behind them."""
    roots: dict[str, tuple[str, ...]] = {}
    for record in records:
        for rewrite in record.rewrites:
            found = _resolved(rewrite.before, roots)
            roots.update(dict.fromkeys(rewrite.after, tuple(name for name in found if name in names)))
    return roots


def _images(records: Sequence[Record], names: set[str]) -> dict[str, tuple[str, ...]]:
    """Return, for nodes that passes took out, the nodes of the last graph that stand for them."""
    images: dict[str, tuple[str, ...]] = {}
    for record in reversed(records):
        for rewrite in record.rewrites:
            found = tuple(name for name in _resolved(rewrite.after, images) if name in names)
            for name in rewrite.before:
                images[name] = found
    return images


def _resolved(names: Iterable[str], known: Mapping[str, tuple[str, ...]]) -> list[str]:
    return list(dict.fromkeys(found for name in names for found in known.get(name, (name,))))


def _sources(
    before: DrawnGraph,
    after: DrawnGraph,
    theirs: Mapping[str, Status],
    made: Mapping[str, tuple[str, ...]],
    roots: Mapping[str, tuple[str, ...]],
) -> dict[str, tuple[str, ...]]:
    found = {}
    for name in after.nodes:
        if theirs[name] == "kept":
            continue
        near = made.get(name, ())
        sources: list[str] = []
        for each in near:
            sources += [each] if each in before.nodes else roots.get(each, ())
        sources = sources or list(roots.get(name, ())) or ([name] if name in before.nodes else [])
        found[name] = tuple(dict.fromkeys(sources))
    return found


def _sites(
    records: Iterable[Record],
    roots: Mapping[str, tuple[str, ...]],
    images: Mapping[str, tuple[str, ...]],
    before: DrawnGraph | None,
    after: DrawnGraph,
) -> tuple[DrawnSite, ...]:
    earlier = before.nodes if before is not None else {}
    found = []
    for record in records:
        standing = record.state == "applied"
        for rewrite in record.rewrites:
            ours = [name for name in _resolved(rewrite.before, roots) if name in earlier] if standing else []
            theirs = [name for name in _resolved(rewrite.after, images) if name in after.nodes] if standing else []
            found.append(
                DrawnSite(
                    record,
                    rewrite.site,
                    True,
                    tuple(ours),
                    tuple(theirs),
                    rewrite.modules_before or rewrite.before,
                    rewrite.modules_after or rewrite.after,
                    frame=_frame(before, ours) or _frame(after, theirs),
                )
            )
        for refusal in record.refusals:
            ours = [name for name in refusal.nodes if name in earlier]
            theirs = [name for name in refusal.nodes if name in after.nodes]
            frame = _frame(after, theirs) or _frame(before, ours)
            places = tuple(ours), tuple(theirs)
            found.append(
                DrawnSite(
                    record, refusal.site, False, *places, reason=refusal.reason, message=refusal.message, frame=frame
                )
            )
    return tuple(found)


def _frame(graph: DrawnGraph | None, names: Iterable[str]) -> Frame | None:
    nodes = () if graph is None else (graph.nodes[name] for name in names)
    frames = (model_frame(node.trace) for node in nodes)
    return next((frame for frame in frames if frame is not None), None)
