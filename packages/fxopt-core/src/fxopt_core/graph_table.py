"""A graph as a table of plain data, and back: what a pickle of a graph module holds instead of generated code.

Each node is one row: operation, target, arguments with other nodes by position, name, type annotation, and of its meta
fxopt's entry and what else pickles among a few keys. Fake tensors and shapes (`val`, `tensor_meta`) are never stored.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.graph import CodeGen, _PyTreeInfo
from torch.fx.node import map_aggregate

from fxopt_core.errors import FxoptError
from fxopt_core.graph import iter_nodes
from fxopt_core.graph_building import add_node, set_order
from fxopt_core.references import NodeRef, Prober, Rebuilt, describe, load_class, operator_reference, spec_reference

META_KEY = "fxopt"
_KEPT_META = ("stack_trace", "nn_module_stack", "from_node", "source_fn_stack", "custom")
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

_Row: TypeAlias = "tuple[str, Any, Any, Any, str, Any, dict[str, Any]]"


@dataclass
class GraphTable:
    """Everything of a graph that a pickle keeps.

    `users` and `inputs` hold, by the position of a node, the order of the positions where it is not the natural one.
    """

    rows: list[_Row]
    codegen: Rebuilt
    users: dict[int, list[int]] = field(default_factory=dict)
    inputs: dict[int, list[int]] = field(default_factory=dict)
    other_names: set[str] = field(default_factory=set)
    name_counts: dict[str, int] = field(default_factory=dict)
    co_fields: dict[str, Any] = field(default_factory=dict)


def write_table(graph: Graph, prober: Prober) -> GraphTable:
    """Turn a graph into a table.

    Raises:
        FxoptError: a target, an argument, an annotation or the code generator cannot be pickled.
    """
    writer = _Writer(graph, prober)
    names = graph._graph_namespace
    table = GraphTable(
        rows=[writer.row(node) for node in iter_nodes(graph)],
        codegen=_codegen_reference(graph._codegen, prober),
        other_names=names._used_names.difference(node.name for node in iter_nodes(graph)),
        name_counts=dict(names._base_count),
        co_fields=dict(graph._co_fields),
    )
    writer.note_orders(table)
    return table


def read_table(table: GraphTable) -> Graph:
    """Build the graph of a table, with the same names, orders, and names that are taken."""
    graph = Graph()
    nodes = [add_node(graph, op, target, name, type_expr) for op, target, _, _, name, type_expr, _ in table.rows]
    for node, (_, _, args, kwargs, _, _, meta) in zip(nodes, table.rows, strict=True):
        node._update_args_kwargs(_with_nodes(args, nodes), _with_nodes(kwargs, nodes))
        node.meta.update(meta)
    for position, order in table.users.items():
        set_order(nodes[position].users, (nodes[user] for user in order))
    for position, order in table.inputs.items():
        set_order(nodes[position]._input_nodes, (nodes[value] for value in order))
    graph._graph_namespace._used_names.update(table.other_names)
    graph._graph_namespace._base_count.update(table.name_counts)
    graph._co_fields.update(table.co_fields)
    codegen: Any = table.codegen  # reading the pickle has called the reference
    graph.set_codegen(codegen)
    return graph


def load_codegen(cls: type[CodeGen], attributes: dict[str, Any], tree: tuple[Any, ...] | None) -> CodeGen:
    """Make a code generator from its class, its attributes, and what describes its pytree inputs and outputs."""
    codegen = cls.__new__(cls)
    vars(codegen).update(attributes)
    if tree is not None:
        vars(codegen)["pytree_info"] = _PyTreeInfo(*tree)
    return codegen


def _with_nodes(argument: Any, nodes: list[Node]) -> Any:
    def node_for(leaf: Any) -> Any:
        return nodes[leaf.position] if isinstance(leaf, NodeRef) else leaf

    return map_aggregate(argument, node_for)


class _Writer:
    """Writes the rows of one graph."""

    def __init__(self, graph: Graph, prober: Prober) -> None:
        self._prober = prober
        self._nodes = list(iter_nodes(graph))
        self._positions = {node: position for position, node in enumerate(self._nodes)}
        self._references = [NodeRef(position) for position in range(len(self._nodes))]
        self._stand_ins: dict[int, Rebuilt | None] = {}
        self._inputs: list[dict[int, None]] = []
        self._classes: dict[type, Rebuilt] = {}

    def row(self, node: Node) -> _Row:
        """Write one node."""
        inputs: dict[int, None] = {}
        self._inputs.append(inputs)
        args, kwargs = (
            map_aggregate(part, lambda leaf: self._leaf(leaf, node, inputs)) for part in (node.args, node.kwargs)
        )
        self._demand(node.type, node, "type annotation", "use a type that can be imported, or remove the annotation")
        return node.op, self._target(node), args, kwargs, node.name, node.type, self._meta(node)

    def note_orders(self, table: GraphTable) -> None:
        """Note the orders of users and inputs that building the graph from its rows would not give."""
        users: list[dict[int, None]] = [{} for _ in self._nodes]
        for position, inputs in enumerate(self._inputs):
            for value in inputs:
                users[value][position] = None
        for position, node in enumerate(self._nodes):
            for natural, actual, noted in (
                (users[position], node.users, table.users),
                (self._inputs[position], node._input_nodes, table.inputs),
            ):
                order = [self._positions[other] for other in actual if other in self._positions]
                if order != list(natural):
                    noted[position] = order

    def _target(self, node: Node) -> Any:
        if isinstance(node.target, str):
            return node.target
        stand_in = self._stand_in(node.target)
        if stand_in is None:
            self._demand(node.target, node, "target", "call a function that can be imported by its name")
        return node.target if stand_in is None else stand_in

    def _leaf(self, leaf: Any, node: Node, inputs: dict[int, None]) -> Any:
        if isinstance(leaf, Node):
            position = self._positions[leaf]
            inputs[position] = None
            return self._references[position]
        if isinstance(leaf, _SYMBOLIC):
            raise FxoptError(
                f"node {node.name!r} has the symbolic value {leaf} as argument, which does not pickle; compute it by a "
                "node of the graph (`torch.ops.aten.sym_size.int`), or use a number"
            )
        if type(leaf) in (bool, int, float, str, type(None)):
            return leaf
        stand_in = self._stand_in(leaf)
        if stand_in is None and not isinstance(leaf, Tensor):
            self._demand(leaf, node, "argument", "pass a value that pickles")
        return leaf if stand_in is None else stand_in

    def _stand_in(self, value: Any) -> Rebuilt | None:
        if id(value) not in self._stand_ins:
            self._stand_ins[id(value)] = operator_reference(value)
        return self._stand_ins[id(value)]

    def _demand(self, value: object, node: Node, role: str, remedy: str) -> None:
        obstacle = self._prober.obstacle(value)
        if obstacle is not None:
            raise FxoptError(
                f"node {node.name!r}: {role} cannot be pickled: {describe(value)} ({obstacle}); {remedy}"
            ) from obstacle

    def _meta(self, node: Node) -> dict[str, Any]:
        kept = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
        stack: Any = kept.get("nn_module_stack")
        if type(stack) in (dict, OrderedDict):
            kept["nn_module_stack"] = type(stack)((key, self._by_name(entry)) for key, entry in stack.items())
        kept = {key: value for key, value in kept.items() if self._prober.obstacle(value) is None}
        return {META_KEY: node.meta[META_KEY], **kept} if META_KEY in node.meta else kept

    def _by_name(self, entry: Any) -> Any:
        """Let an entry of a module stack name its class, so that reading the pickle needs no class of the model."""
        if not (type(entry) is tuple and len(entry) == 2 and isinstance(entry[1], type)):
            return entry
        if entry[1] not in self._classes:
            self._classes[entry[1]] = Rebuilt(load_class, entry[1].__module__, entry[1].__qualname__)
        return entry[0], self._classes[entry[1]]


def _codegen_reference(codegen: CodeGen, prober: Prober) -> Rebuilt:
    attributes = {key: value for key, value in vars(codegen).items() if not isinstance(value, _PyTreeInfo)}
    for name, value in (("class", type(codegen)), *attributes.items()):
        obstacle = prober.obstacle(value)
        if obstacle is not None:
            raise FxoptError(
                f"the graph's code generator cannot be pickled: {name} is {describe(value)} ({obstacle}); do without, "
                "or use a class and functions that can be imported"
            ) from obstacle
    info = vars(codegen).get("pytree_info")
    if isinstance(info, _PyTreeInfo):
        specs = (None if spec is None else spec_reference(spec) for spec in (info.in_spec, info.out_spec))
        return Rebuilt(load_codegen, type(codegen), attributes, (list(info.orig_args), *specs))
    return Rebuilt(load_codegen, type(codegen), attributes, None)
