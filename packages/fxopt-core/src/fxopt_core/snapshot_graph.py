"""What a snapshot keeps of a graph and of per-instance classes: every field, so that restoring is exact.

Only plain reads and copies happen here, no torch computation. Restoring writes the fields of the C structure behind a
node directly, because `Node.__setattr__` and `Graph.erase_node` call the owner's hooks and edit side tables on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from torch.fx import Graph, GraphModule

from fxopt_core.graph import iter_nodes
from fxopt_core.snapshot_containers import Containers, put_back

_FIELDS = (
    "op",
    "target",
    "_args",
    "_kwargs",
    "name",
    "type",
    "_sort_key",
    "_erased",
    "_repr_fn",
    "graph",
    "meta",
    "users",
    "_input_nodes",
)
_CLASS_FIELDS_LEFT_ALONE = frozenset({"__dict__", "__weakref__"})


class ObjectState:
    """An object's namespace."""

    __slots__ = ("attributes", "obj")

    def __init__(self, obj: object) -> None:
        self.obj = obj
        self.attributes: dict[str, Any] = dict(vars(obj))

    def restore(self) -> None:
        """Put the namespace back."""
        put_back(vars(self.obj), self.attributes)


class GraphState:
    """All of a graph: its nodes in order with every field, its side tables, name space and code generator.

    Fields are kept by column, one list for all nodes, which is several times faster to fill than a record per node.
    `containers` gets what `meta`, side tables and attributes hold.
    """

    __slots__ = ("attributes", "columns", "inputs", "nodes", "objects", "users")

    def __init__(self, graph: Graph, containers: Containers) -> None:
        self.nodes = [graph._root, *iter_nodes(graph)]
        self.columns: dict[str, list[Any]] = {name: list(map(attrgetter(name), self.nodes)) for name in _FIELDS}
        self.users = list(map(tuple, self.columns["users"]))
        self.inputs = list(map(tuple, self.columns["_input_nodes"]))
        own = zip(self.nodes, map(vars, self.nodes), strict=True)
        self.attributes = {node: dict(attributes) for node, attributes in own if attributes}
        parts = (graph, graph._graph_namespace, graph._find_nodes_lookup_table, graph._codegen)
        self.objects = [ObjectState(part) for part in parts]
        containers.add_dictionaries(self.columns["meta"])
        for attributes in (*self.attributes.values(), *(part.attributes for part in self.objects)):
            containers.add(attributes.values())

    def restore(self) -> None:
        """Put everything back into the same objects, without calling any hook; linear in the number of nodes."""
        for state in self.objects:
            state.restore()
        for name, column in self.columns.items():
            for node, value in zip(self.nodes, column, strict=True):
                object.__setattr__(node, name, value)
        self._restore_dictionaries()
        for before, after in zip(self.nodes, [*self.nodes[1:], self.nodes[0]], strict=True):
            object.__setattr__(before, "_next", after)
            object.__setattr__(after, "_prev", before)

    def _restore_dictionaries(self) -> None:
        for node, users, inputs in zip(self.nodes, self.users, self.inputs, strict=True):
            put_back(node.users, dict.fromkeys(users))
            put_back(node._input_nodes, dict.fromkeys(inputs))
            if vars(node):
                vars(node).clear()
        for node, attributes in self.attributes.items():
            vars(node).update(attributes)


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


def own_classes(graph_module: GraphModule) -> list[type]:
    """Return the classes that belong to one graph module alone: its own, and torch's underneath a swapped one."""
    classes = type(graph_module).__mro__
    own = [cls for cls in classes if cls is classes[0] or cls.__qualname__.endswith("GraphModuleImpl")]
    return [cls for cls in own if cls is not GraphModule]
