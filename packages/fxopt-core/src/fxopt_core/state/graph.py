"""What a snapshot keeps of a graph and of per-instance classes: every field, so that restoring is exact.

Only plain reads and copies happen here, no torch computation. Restoring writes the fields of the C structure behind a
node directly, because `Node.__setattr__` and `Graph.erase_node` call the owner's hooks and edit side tables on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from torch.fx import Graph

from fxopt_core._torch import NODE_FIELDS, inputs_of, link, sentinel, side_tables
from fxopt_core.graph import iter_nodes
from fxopt_core.state.containers import Containers, put_back

_CLASS_FIELDS_LEFT_ALONE = frozenset({"__dict__", "__weakref__"})


class GraphState:
    """All of a graph: its nodes in order with every field, its side tables, name space and code generator.

    Fields are kept by column, one list for all nodes, which is several times faster to fill than a record per node.
    `containers` gets what `meta`, side tables and attributes hold.
    """

    __slots__ = ("attributes", "columns", "inputs", "namespaces", "nodes", "users")

    def __init__(self, graph: Graph, containers: Containers) -> None:
        self.nodes = [sentinel(graph), *iter_nodes(graph)]
        self.columns: dict[str, list[Any]] = {name: list(map(attrgetter(name), self.nodes)) for name in NODE_FIELDS}
        self.users = list(map(tuple, self.columns["users"]))
        self.inputs = list(map(tuple, map(inputs_of, self.nodes)))
        own = zip(self.nodes, map(vars, self.nodes), strict=True)
        self.attributes = {node: dict(attributes) for node, attributes in own if attributes}
        parts = (graph, *side_tables(graph))
        self.namespaces = [(vars(part), dict(vars(part))) for part in parts]
        containers.add_dictionaries(self.columns["meta"])
        for attributes in (*self.attributes.values(), *(held for _, held in self.namespaces)):
            containers.add(attributes.values())

    def restore(self) -> None:
        """Put everything back into the same objects, without calling any hook; linear in the number of nodes."""
        for namespace, held in self.namespaces:
            put_back(namespace, held)
        for name, column in self.columns.items():
            for node, value in zip(self.nodes, column, strict=True):
                object.__setattr__(node, name, value)
        for node, users, inputs in zip(self.nodes, self.users, self.inputs, strict=True):
            put_back(node.users, dict.fromkeys(users))
            put_back(inputs_of(node), dict.fromkeys(inputs))
            if vars(node):
                vars(node).clear()
        for node, attributes in self.attributes.items():
            vars(node).update(attributes)
        link(self.nodes)


class ClassState:
    """The attributes of the class that torch makes for each graph module, where its compiled `forward` lives."""

    __slots__ = ("attributes", "cls", "name", "qualified_name")

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.attributes: Mapping[str, Any] = dict(vars(cls))
        self.name, self.qualified_name = cls.__name__, cls.__qualname__

    def restore(self) -> None:
        """Set, replace and delete class attributes until the class is as it was."""
        now = vars(self.cls)
        for name in [name for name in now if name not in self.attributes]:
            delattr(self.cls, name)
        for name, value in self.attributes.items():
            if name not in _CLASS_FIELDS_LEFT_ALONE and now.get(name, self) is not value:
                setattr(self.cls, name, value)
        if (self.cls.__name__, self.cls.__qualname__) != (self.name, self.qualified_name):
            self.cls.__name__, self.cls.__qualname__ = self.name, self.qualified_name
