"""Typed walks over a graph."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Graph, Node


def iter_nodes(graph: Graph) -> Iterator[Node]:
    """Yield the nodes of a graph in order, typed.

    ``for node in graph.nodes`` is typed ``Any`` in torch, so that a type checker sees nothing inside such a loop.
    Nodes may be erased or inserted while walking, as with ``graph.nodes``.

    >>> import torch
    >>> graph = torch.fx.symbolic_trace(torch.nn.ReLU()).graph
    >>> [node.op for node in iter_nodes(graph)]
    ['placeholder', 'call_function', 'output']
    """
    node: Node
    for node in graph.nodes:
        yield node
