"""The seam to torch.fx: the one file of fxopt-core that names private fields of graphs, nodes and code generators.

torch.fx keeps what an exact rollback, copy or pickle needs in fields without public access: the order of users and
inputs, the names that are taken, and the counter of each base name. When torch moves these, this file changes. It
checks for all of them at import, so that an unsupported torch fails here with one clear error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.fx import Graph, Node
from torch.fx.graph import CodeGen

#: The attributes of a graph that hold its nodes.
STRUCTURE = ("_root", "_insert", "_len", "_graph_namespace", "_find_nodes_lookup_table")
# Fields that a new graph has too, and that a copy takes over.
OWN_GRAPH_FIELDS = ("_used_names", "_co_fields", "_tracer_cls", "_tracer_extras")


def _check() -> None:
    """Raise an `ImportError` if this torch lacks a name that this file reads."""
    graph = Graph()
    own = (*STRUCTURE, "_codegen", "_co_fields", "_tracer_cls")
    require_torch("fxopt-core", [(torch.fx.graph, ("_ExportCodeGen", "_PyTreeCodeGen", "_PyTreeInfo")), (graph, own)])
    names = ("_used_names", "_base_count", "associate_name_with_obj")
    require_torch("fxopt-core", [(graph._graph_namespace, names), (graph._find_nodes_lookup_table, ("insert",))])
    require_torch("fxopt-core", [(graph.placeholder("x"), ("_input_nodes", "_update_args_kwargs"))])


def require_torch(distribution: str, wanted: Iterable[tuple[object, Iterable[str]]]) -> None:
    """Check that torch has the private names that a distribution reads; the one file that reads them calls this.

    Args:
        distribution: its name, for the message.
        wanted: modules, classes and objects, each with the names to look for in it.

    Raises:
        ImportError: this torch lacks some of the names; the message lists them all.

    >>> require_torch("my-passes", [(torch.nn, ("_reduction", "_reductions"))])
    Traceback (most recent call last):
    ImportError: torch ... has no torch.nn._reductions, which my-passes reads: ...
    """
    missing = [
        f"{getattr(part, '__name__', type(part).__name__)}.{name}"
        for part, names in wanted
        for name in names
        if not hasattr(part, name)
    ]
    if missing:
        found = f"torch {torch.__version__} has no {', '.join(missing)}, which {distribution} reads"
        remedy = f"install a newer {distribution}, or the torch that it was tested with (2.13 and 2.14)"
        raise ImportError(f"{found}: {remedy}")


_check()

PyTreeCodeGen = torch.fx.graph._PyTreeCodeGen
PyTreeInfo: TypeAlias = torch.fx.graph._PyTreeInfo
ExportCodeGen = torch.fx.graph._ExportCodeGen


# --- Nodes


def inputs_of(node: Node) -> dict[Node, None]:
    """Return the nodes that a node reads, in torch's order: `all_input_nodes` without a copy."""
    return node._input_nodes


def set_arguments(node: Node, args: Any, kwargs: Any) -> None:
    """Set a node's arguments without the copy and the search for symbolic numbers that torch's properties make."""
    node._update_args_kwargs(args, kwargs)


def add_node(graph: Graph, op: str, target: Any, name: str, type_expr: Any = None) -> Node:
    """Append a node without arguments, under exactly this name, without calling hooks.

    `Graph.create_node` would choose a name, and call the hooks of the graph's owner.

    >>> add_node(Graph(), "placeholder", "x", "any_name")
    any_name
    """
    node = Node(graph, name, op, target, (), {}, type_expr)
    graph._graph_namespace._used_names.add(name)
    graph._graph_namespace.associate_name_with_obj(name, node)
    # The nodes form a ring that the root closes, so the place before the root is the end.
    graph._root.prepend(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


# --- Names


class Names(NamedTuple):
    """torch's own tables of a graph's names, not copies."""

    taken: set[str]  # torch will not give them to another node
    counts: dict[str, int]  # how far torch has counted for each base of a name


def names_of(graph: Graph) -> Names:
    """Return the names that are taken in a graph, and the counters of their bases."""
    return Names(graph._graph_namespace._used_names, graph._graph_namespace._base_count)


# --- Code generators


def codegen_of(graph: Graph) -> CodeGen:
    """Return the code generator of a graph."""
    return graph._codegen
