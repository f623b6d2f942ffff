"""Building a graph with given names and order, for copies and for unpickling.

`Graph.create_node` chooses names and calls the owner's hooks, and `Graph.__deepcopy__` goes through it. Here every node
gets the very name that it is to have: first all nodes, then their arguments, then the order that users and inputs had.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.fx import Graph, Node


def add_node(graph: Graph, op: str, target: Any, name: str, type_expr: Any = None) -> Node:
    """Append a node without arguments, under exactly this name, without calling hooks.

    >>> add_node(Graph(), "placeholder", "x", "any_name")
    any_name
    """
    node = Node(graph, name, op, target, (), {}, type_expr)
    graph._graph_namespace._used_names.add(name)
    graph._graph_namespace.associate_name_with_obj(name, node)
    graph._root.prepend(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def set_order(nodes: dict[Node, None], order: Iterable[Node]) -> None:
    """Bring the users or the inputs of a node, the same ones, into the order that they are to have."""
    ordered = dict.fromkeys(order)
    nodes.clear()
    nodes.update(ordered)
