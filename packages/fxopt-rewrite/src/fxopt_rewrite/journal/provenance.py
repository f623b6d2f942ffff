"""`provenance`: the nodes and modules from which a node of a graph came, and the passes that made it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fxopt_core import (
    Ledger,
    NodeTag,
    Record,
    Rewrite,
    ledger_of,
    tag_of,
    type_text,
)
from fxopt_core.errors import PreconditionError
from fxopt_rewrite.journal.edits import NodeRemoved, of_kind
from fxopt_rewrite.journal.journal import edits_of


@dataclass(frozen=True)
class Provenance:
    """Where a node came from.

    Attributes:
        pass_name: the pass that made or changed the node; None if no record says.
        signature: the signature of that pass, if it has one.
        nodes: names of the nodes that it replaced, as of then.
        modules: full names of the modules, parameters and buffers that were removed at its site.
        sources: the provenance of those of the nodes that an earlier pass had made, in the order of `nodes`.
    """

    pass_name: str | None
    signature: str | None
    nodes: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    sources: tuple[Provenance, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines(""))

    def _lines(self, indent: str) -> Iterator[str]:
        modules = f" (was {', '.join(self.modules)})" if self.modules else ""
        name = self.pass_name or "an unknown pass"
        yield f"{indent}{name}: from {', '.join(self.nodes) or 'nothing'}{modules}"
        for source in self.sources:
            yield from source._lines(f"{indent}  ")


def provenance(node: Node) -> Provenance | None:
    """Return from which nodes and modules a node came, and by which pass; None for a node of the original graph.

    It reads what copies, pickles and archives keep: the tag of the node, and the ledger of its graph module. The
    provenance of nodes that a pass made through an `Editor` is exact; for a node that a pass merely marked as
    transformed, it is the pass and the node that was there before, if any.

    Raises:
        PreconditionError: The argument is not a node.

    >>> from fxopt_core import iter_nodes
    >>> import torch
    >>> graph_module = torch.fx.symbolic_trace(torch.nn.ReLU())
    >>> [provenance(node) for node in iter_nodes(graph_module.graph)]
    [None, None, None]
    """
    if not isinstance(node, Node):
        raise PreconditionError(
            f"provenance is given {type_text(node)}, expected a torch.fx.Node, one of graph_module.graph.nodes"
        )
    tag = tag_of(node)
    if tag.origin is None and not tag.marks:
        return None
    owner = node.graph.owning_module
    origins = _Origins.of(ledger_of(owner) if isinstance(owner, GraphModule) else Ledger())
    return origins.made(tag, tag.name or node.name) if tag.origin else origins.marked(tag, node.name)


class _Origins:
    def __init__(self, ledger: Ledger) -> None:
        self._sites: dict[str, list[tuple[int, Record, Rewrite]]] = {}
        self._tags: dict[tuple[int, str], NodeTag] = {}
        for place, record in enumerate(ledger.records):
            if record.state != "applied":
                continue
            for rewrite in record.rewrites:
                for name in rewrite.after:
                    self._sites.setdefault(name, []).append((place, record, rewrite))
            for edit in of_kind(edits_of(record), NodeRemoved):
                if edit.row.tag is not None:
                    self._tags[place, edit.row.name] = edit.row.tag

    @classmethod
    def of(cls, ledger: Ledger) -> _Origins:
        """Return the origins in a ledger, made once: a ledger never changes."""
        known = vars(ledger).get("_origins")
        if not isinstance(known, _Origins):
            known = vars(ledger)["_origins"] = cls(ledger)
        return known

    def made(self, tag: NodeTag, name: str, before: int | None = None) -> Provenance:
        """Return the provenance of a node that a pass made, by the records up to the position ``before``."""
        assert tag.origin is not None
        pass_name, nodes = tag.origin
        for place, record, rewrite in reversed(self._sites.get(name, [])):
            if record.pass_name == pass_name and (before is None or place <= before):
                sources = (self._source(place, each) for each in nodes)
                known = tuple(source for source in sources if source is not None)
                return Provenance(pass_name, record.signature or None, nodes, rewrite.modules_before, known)
        return Provenance(pass_name, tag.marks[0] if tag.marks else None, nodes)

    def _source(self, place: int, name: str) -> Provenance | None:
        tag = self._tags.get((place, name))
        return None if tag is None or tag.origin is None else self.made(tag, tag.name or name, place)

    def marked(self, tag: NodeTag, name: str) -> Provenance:
        for _, record, rewrite in reversed(self._sites.get(name, [])):
            if record.signature in tag.marks:
                return Provenance(record.pass_name, record.signature, rewrite.before, rewrite.modules_before)
        return Provenance(None, tag.marks[-1])
