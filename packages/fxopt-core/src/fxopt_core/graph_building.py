"""Building a graph with given names and order, for copies and for unpickling.

`Graph.create_node` chooses names and calls the owner's hooks, and `Graph.__deepcopy__` goes through it. Here every node
gets the very name that it is to have: first all nodes, then their arguments, then the order that users and inputs had.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import dtype, memory_format
from torch.fx import Graph, Node
from torch.fx.traceback import NodeSource, NodeSourceAction


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


_PLAIN = frozenset({Node, bool, int, float, str, type(None), dtype, memory_format})


def insert_node(
    graph: Graph, before: Node, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Node:
    """Insert a node before another one.

    `Graph.create_node` looks through all arguments for symbolic numbers, to warn of them, which takes as long as all
    else that it does; here it is given only arguments that may be such.

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
    node._update_args_kwargs(args, kwargs)
    return node


def _is_plain(argument: object) -> bool:
    cls = type(argument)
    return cls in _PLAIN or (cls is tuple and all(map(_is_plain, argument)))  # type: ignore[call-overload]  # a tuple


def source_note(node: Node, pass_name: str) -> NodeSource:
    """Return torch's note of the node that another one replaces, for ``meta["from_node"]``.

    Where that node came from another one itself, torch copies all notes of that, deeply; they never change, so that a
    list of the same ones will do.
    """
    note = NodeSource(None, pass_name, NodeSourceAction.REPLACE)
    note.node_info = NodeSource.NodeInfo(node.name, str(node.target), id(node.graph))
    earlier = node.meta.get("from_node")
    note.from_node = list(earlier) if isinstance(earlier, (list, tuple)) else []
    return note
