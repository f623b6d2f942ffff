"""Graph operations that torch lacks and an `Editor` needs: quick insertion, notes of origin, names, targets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.traceback import NodeSource, NodeSourceAction

from fxopt_core import (
    iter_nodes,
    names_of,
    set_arguments,
    tag_of,
)

_PLAIN = frozenset({Node, bool, int, float, str, type(None), torch.dtype, torch.memory_format})


def insert_node(
    graph: Graph, before: Node, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Node:
    """Insert a node before another one.

    `Graph.create_node` searches all arguments for symbolic numbers, to warn of them, which takes half of its time;
    plain arguments are therefore set afterwards.

    >>> graph = Graph()
    >>> x = graph.placeholder("x")
    >>> output = graph.output(x)
    >>> insert_node(graph, output, "call_method", "neg", (x,), {}), list(graph.nodes)
    (neg, [x, neg, output])
    """
    plain = all(map(_is_plain, args)) and all(map(_is_plain, kwargs.values()))
    with graph.inserting_before(before):
        if not plain:
            return graph.create_node(op, target, args, kwargs)
        node = graph.create_node(op, target)
    set_arguments(node, args, kwargs)
    return node


def _is_plain(argument: object) -> bool:
    cls = type(argument)
    return cls in _PLAIN or (cls is tuple and all(map(_is_plain, argument)))  # type: ignore[call-overload]  # a tuple


def source_note(node: Node, pass_name: str) -> NodeSource:
    """Return torch's note of the node that another one replaces, for ``meta["from_node"]``.

    torch would copy the earlier notes of the node deeply; since notes never change, this one refers to them.
    """
    note = NodeSource(None, pass_name, NodeSourceAction.REPLACE)
    note.node_info = NodeSource.NodeInfo(node.name, str(node.target), id(node.graph))
    earlier = node.meta.get("from_node")
    note.from_node = list(earlier) if isinstance(earlier, (list, tuple)) else []
    return note


class NameCounts:
    """torch's counters of names at one moment, so that an undo can restore them.

    >>> graph = Graph()
    >>> counts = NameCounts(graph)
    >>> [counts.before(graph.placeholder("x").name) for _ in range(2)]
    [('x', None), None]
    """

    def __init__(self, graph: Graph) -> None:
        self._counts = dict(names_of(graph).counts)
        self._asked: set[str] = set()

    def before(self, name: str) -> tuple[str, int | None] | None:
        """Return the base of a new name and its earlier count; None if this base was asked for before."""
        head, _, number = name.rpartition("_")
        base = head if head and number.isdigit() else name
        if base in self._asked:
            return None
        self._asked.add(base)
        return base, self._counts.get(base)


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
