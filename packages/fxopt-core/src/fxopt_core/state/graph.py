"""Graphs recorded as rows of nodes, from which rollbacks, copies and pickles fill a graph again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from fxopt_core._torch import STRUCTURE, add_node, codegen_of, names_of, set_arguments
from fxopt_core.graph import iter_nodes
from fxopt_core.state.containers import Containers, put_back

_ROW = attrgetter("op", "target", "name", "type", "args", "kwargs")
_CLASS_FIELDS_LEFT_ALONE = frozenset({"__dict__", "__weakref__"})


class NodeAt(int):
    """A node by its position, in rows that are to be pickled."""


class GraphRows:
    """The nodes of a graph in order, the fields and users of each, and the names that are taken.

    Inputs are not recorded: torch keeps them in the order of the arguments.
    """

    def __init__(self, graph: Graph) -> None:
        self.nodes = list(iter_nodes(graph))
        self.rows = list(map(_ROW, self.nodes))
        self._users = [list(node.users) for node in self.nodes]
        names = names_of(graph)
        self._names = set(names.taken), dict(names.counts)

    def are_in(self, graph: Graph, *, exactly: bool = True) -> bool:
        """Return whether a graph has these very nodes; if ``exactly``, with users and taken names as they were."""
        nodes = list(iter_nodes(graph))
        # By identity, which is safe since the rows hold all arguments: no new tuple gets the address of an old one.
        parts = chain.from_iterable(map(_ROW, nodes))
        same = nodes == self.nodes and all(map(is_, parts, chain.from_iterable(self.rows)))
        exact = not exactly or ([list(node.users) for node in nodes], names_of(graph)) == (self._users, self._names)
        return same and exact

    def apart(self, form: Callable[[Any], Any]) -> GraphRows:
        """Return these rows with nodes replaced by positions, and other objects by what ``form`` returns for them."""
        at = {node: NodeAt(position) for position, node in enumerate(self.nodes)}

        def leaf(value: Any) -> Any:
            return at[value] if type(value) is Node else form(value)

        twin = copy.copy(self)
        twin.nodes = range(len(at))  # type: ignore[assignment]  # positions
        twin.rows = [
            (op, form(target), name, form(kind), map_aggregate(args, leaf), dict(map_aggregate(kwargs, leaf)))
            for op, target, name, kind, args, kwargs in self.rows
        ]
        twin._users = [[int(at[user]) for user in users if user in at] for users in self._users]  # type: ignore[misc]  # positions
        return twin

    def fill(self, graph: Graph, of: Callable[[Any], Any] = lambda value: value) -> dict[Node, Node]:
        """Make these nodes again in an empty graph; return the new ones by the old.

        ``of`` maps targets, and everything in arguments that is not a node.
        """
        new = {
            node: add_node(graph, op, of(target), name, kind)
            for node, (op, target, name, kind, *_) in zip(self.nodes, self.rows, strict=True)
        }

        def leaf(value: Any) -> Any:
            return new[value] if type(value) in (Node, NodeAt) else of(value)

        for node, (*_, args, kwargs) in zip(self.nodes, self.rows, strict=True):
            set_arguments(new[node], map_aggregate(args, leaf), map_aggregate(kwargs, leaf))
        for node, users in zip(self.nodes, self._users, strict=True):
            # Setting arguments added the users in the order of the nodes; several users may have been in another order.
            if len(users) > 1 or len(users) != len(new[node].users):
                put_back(new[node].users, dict.fromkeys([new[user] for user in users if user in new]))
        put_back(names_of(graph).taken, self._names[0])
        put_back(names_of(graph).counts, self._names[1])
        return new


class GraphState:
    """The state of a graph; restoring it keeps the graph object, and makes new nodes if nodes have changed.

    ``containers`` records what `meta` and attributes hold.
    """

    def __init__(self, graph: Graph, containers: Containers) -> None:
        self._graph, self._rows = graph, GraphRows(graph)
        self._metas = list(map(attrgetter("meta"), self._rows.nodes))
        self._own = {node: dict(vars(node)) for node in filter(vars, self._rows.nodes)}
        self._attributes = [(vars(part), dict(vars(part))) for part in (graph, codegen_of(graph))]
        containers.add([*self._metas, *self._own.values(), *(held for _, held in self._attributes)])

    def restore(self) -> None:
        """Restore everything except the contents of containers; linear in the number of nodes."""
        new: Mapping[Node, Node] = {}
        unchanged = self._rows.are_in(self._graph)
        if not unchanged:
            Graph.__init__(self._graph)  # empties it, without calling hooks
            new = self._rows.fill(self._graph)
        # These hold the new nodes; the recorded ones still refer to the old nodes.
        structure = {} if unchanged else {key: vars(self._graph)[key] for key in STRUCTURE}
        for place, (attributes, held) in enumerate(self._attributes):
            put_back(attributes, held if place else {**held, **structure})
        for node, meta in zip(self._rows.nodes, self._metas, strict=True):
            now = new.get(node, node)
            if now.meta is not meta:
                now.meta = meta
            if vars(now) or node in self._own:
                put_back(vars(now), self._own.get(node, {}))


def own_classes(graph_module: GraphModule) -> list[type]:
    """Return the classes that only this graph module has: its own, and the one of torch beneath a swapped class."""
    # Parametrizing a module swaps its class for a new subclass, beneath which is the class that torch made.
    classes = type(graph_module).__mro__
    own = [cls for cls in classes if cls is classes[0] or cls.__qualname__.endswith("GraphModuleImpl")]
    return [cls for cls in own if cls is not GraphModule]


class ClassState:
    """The attributes of the class that torch makes for each graph module, where its compiled `forward` lives."""

    def __init__(self, cls: type) -> None:
        self.cls, self.attributes, self.names = cls, dict(vars(cls)), (cls.__name__, cls.__qualname__)

    def restore(self) -> None:
        """Set, replace and delete class attributes until the class is as it was."""
        now = vars(self.cls)
        for name in [name for name in now if name not in self.attributes]:
            delattr(self.cls, name)
        for name, value in self.attributes.items():
            if name not in _CLASS_FIELDS_LEFT_ALONE and now.get(name, self) is not value:
                setattr(self.cls, name, value)
        self.cls.__name__, self.cls.__qualname__ = self.names
