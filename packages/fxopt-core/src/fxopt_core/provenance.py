"""`provenance`: from which nodes and modules, and by which passes, a node of a graph came."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fxopt_core.errors import PreconditionError
from fxopt_core.ledger import Ledger, NodeRemoved, Record, Rewrite, ledger_of
from fxopt_core.marks import NodeTag, tag_of


@dataclass(frozen=True)
class Provenance:
    """Where a node came from.

    Attributes:
        pass_name: the pass that made the node, or changed it; None where no record tells which one that was.
        signature: the signature of that pass; None for a pass that has none.
        nodes: names of the nodes that it stands for, as they were called then.
        modules: full names of the modules, parameters and buffers that were taken out at its site.
        sources: where those of the nodes came from that a pass had made before, in the order of `nodes`.
        stack_trace: the place in the model's own source where the first of the nodes came from; None where it is
            unknown.
    """

    pass_name: str | None
    signature: str | None
    nodes: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    sources: tuple[Provenance, ...] = ()
    stack_trace: str | None = None

    def chain(self) -> tuple[str, ...]:
        """Return the names of all passes on the way here, each once, the last one first."""
        return tuple(dict.fromkeys(name for name in self._passes() if name is not None))

    def _passes(self) -> Iterator[str | None]:
        yield self.pass_name
        for source in self.sources:
            yield from source._passes()

    def __str__(self) -> str:
        """Return what is known in a line, and a line for each source beneath it."""
        return "\n".join(self._lines(""))

    def _repr_html_(self) -> str:
        """Return what is known for a notebook."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def _lines(self, indent: str) -> Iterator[str]:
        modules = f" (was {', '.join(self.modules)})" if self.modules else ""
        name = self.pass_name or "an unknown pass"
        yield f"{indent}{name}: from {', '.join(self.nodes) or 'nothing'}{modules}"
        for source in self.sources:
            yield from source._lines(f"{indent}  ")


def provenance(node: Node) -> Provenance | None:
    """Return from which nodes and modules a node came, and by which pass; None for a node of the original graph.

    It reads what copies, pickles and archives keep: what is noted at the node, and the ledger of its graph module.
    Nodes that a pass made through an `Editor` or a site pass are known exactly. Of a node that a pass of one's own
    marked as transformed, that pass is known, and the node itself, if it was there before.

    Raises:
        PreconditionError: It is no node.
        FxoptError: A newer version of fxopt wrote the ledger.

    >>> from fxopt_core import iter_nodes
    >>> import torch
    >>> graph_module = torch.fx.symbolic_trace(torch.nn.ReLU())
    >>> [provenance(node) for node in iter_nodes(graph_module.graph)]
    [None, None, None]
    """
    _check_node(node)
    tag = tag_of(node)
    if tag.origin is None and not tag.marks:
        return None
    owner = node.graph.owning_module
    origins = _Origins.of(ledger_of(owner) if isinstance(owner, GraphModule) else Ledger())
    found = origins.made(tag, tag.name or node.name) if tag.origin else origins.marked(tag, node.name)
    trace = node.meta.get("stack_trace")
    return found if trace is None else _with_trace(found, str(trace))


def _check_node(node: object) -> None:
    if not isinstance(node, Node):
        raise PreconditionError(
            f"provenance is given a {type(node).__name__}, expected a torch.fx.Node, one of graph_module.graph.nodes"
        )


def _with_trace(found: Provenance, trace: str) -> Provenance:
    return Provenance(found.pass_name, found.signature, found.nodes, found.modules, found.sources, trace)


class _Origins:
    """What the records of a ledger say of nodes by their names."""

    def __init__(self, ledger: Ledger) -> None:
        self._sites: dict[str, list[tuple[int, Record, Rewrite]]] = {}
        self._tags: dict[tuple[int, str], NodeTag] = {}
        for place, record in enumerate(ledger.records):
            if record.state != "applied":
                continue
            for rewrite in record.rewrites:
                for name in rewrite.after:
                    self._sites.setdefault(name, []).append((place, record, rewrite))
            for operation in record.operations or ():
                if isinstance(operation, NodeRemoved) and operation.row.tag is not None:
                    self._tags[place, operation.row.name] = operation.row.tag

    @classmethod
    def of(cls, ledger: Ledger) -> _Origins:
        """Return those of a ledger, which never changes: they are made once."""
        known = vars(ledger).get("_origins")
        if not isinstance(known, _Origins):
            known = vars(ledger)["_origins"] = cls(ledger)
        return known

    def made(self, tag: NodeTag, name: str, before: int | None = None) -> Provenance:
        """Return where a node came from that a pass made; of the records, those in front of ``before`` count."""
        assert tag.origin is not None
        pass_name, nodes = tag.origin
        place, record, rewrite = self._site(pass_name, name, before)
        if record is None or rewrite is None:
            return Provenance(pass_name, tag.marks[0] if tag.marks else None, nodes)
        sources = (self._source(place, each) for each in nodes)
        known = tuple(source for source in sources if source is not None)
        return Provenance(pass_name, record.signature or None, nodes, rewrite.modules_before, known)

    def _site(self, pass_name: str, name: str, before: int | None) -> tuple[int, Record | None, Rewrite | None]:
        for place, record, rewrite in reversed(self._sites.get(name, [])):
            if record.pass_name == pass_name and (before is None or place <= before):
                return place, record, rewrite
        return -1, None, None

    def _source(self, place: int, name: str) -> Provenance | None:
        """Return where a node came from that a record took out."""
        tag = self._tags.get((place, name))
        return None if tag is None or tag.origin is None else self.made(tag, tag.name or name, place)

    def marked(self, tag: NodeTag, name: str) -> Provenance:
        """Return what is known of a node that a pass marked without having made it by core's means."""
        for _, record, rewrite in reversed(self._sites.get(name, [])):
            if record.signature in tag.marks:
                return Provenance(record.pass_name, record.signature, rewrite.before, rewrite.modules_before)
        return Provenance(None, tag.marks[-1])
