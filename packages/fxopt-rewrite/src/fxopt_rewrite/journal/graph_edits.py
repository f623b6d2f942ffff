"""Graph operations that torch lacks and an `Editor` needs: quick insertion, notes of origin, names, targets."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.fx import Graph, Node
from torch.fx.traceback import NodeSource, NodeSourceAction

from fxopt_core import (
    iter_nodes,
    tag_of,
)


def source_note(node: Node, pass_name: str) -> NodeSource:
    """Return torch's note of the node that another one replaces, for ``meta["from_node"]``.

    torch would copy the earlier notes of the node deeply; since notes never change, this one refers to them.
    """
    note = NodeSource(None, pass_name, NodeSourceAction.REPLACE)
    note.node_info = NodeSource.NodeInfo(node.name, str(node.target), id(node.graph))
    earlier = node.meta.get("from_node")
    note.from_node = list(earlier) if isinstance(earlier, (list, tuple)) else []
    return note


class TargetNodes:
    """The ``call_module`` and ``get_attr`` nodes of a graph by what they name, kept up while the graph is edited.

    ``Graph.find_nodes`` walks all nodes of that kind each time.

    >>> import torch
    >>> targets = TargetNodes(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU())).graph)
    >>> [str(node) for node in targets.of("call_module", "0")], targets.of("get_attr", "0")
    (['_0'], [])
    """

    def __init__(self, graph: Graph) -> None:
        self._nodes: dict[tuple[str, str], dict[Node, None]] = {}
        for node in iter_nodes(graph):
            self.add(node)

    def add(self, node: Node) -> None:
        """Record a node that was inserted."""
        if node.op in ("call_module", "get_attr"):
            self._nodes.setdefault((node.op, str(node.target)), {})[node] = None

    def discard(self, node: Node) -> None:
        """Record a node that was removed."""
        if node.op in ("call_module", "get_attr"):
            self._nodes.get((node.op, str(node.target)), {}).pop(node, None)

    def of(self, op: str, target: str) -> list[Node]:
        """Return the nodes with this operation that name this module or attribute."""
        return list(self._nodes.get((op, target), ()))


def nodes_by_id(graph: Graph) -> dict[int, list[Node]]:
    """Return the nodes of a graph by their number.

    A node shares its number with nodes that its meta was copied to. If one of them has the name that came with the
    number, the list holds only this one.
    """
    found: dict[int, list[Node]] = {}
    for node in iter_nodes(graph):
        number = tag_of(node).id
        if number is not None:
            found.setdefault(number, []).append(node)
    return {number: by_name(nodes) for number, nodes in found.items()}


def by_name(nodes: list[Node]) -> list[Node]:
    """Return the nodes, among those with one number, that have the name that came with it; all if none has."""
    return nodes if len(nodes) == 1 else [node for node in nodes if node.name == tag_of(node).name] or nodes


def identities(root: nn.Module) -> Iterator[int]:
    """Yield the identity of every module and tensor once for each of its names."""
    for _, module in root.named_modules(remove_duplicate=False):
        yield id(module)
        yield from (id(tensor) for tensor in (*module._parameters.values(), *module._buffers.values()))
