"""A graph as rows of data, and back, node for node: for archives and tables of sizes.

Each node is one row: operation, name, target, arguments with other nodes by position, and the origin of the node.
Besides the rows, the data holds the orders of users and inputs that building the graph would not reproduce, and the
names that are taken. Fake tensors and shapes (`val`, `tensor_meta`) are left out. torch generates Python from a graph,
so reading one checks whatever becomes code.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch.fx import Graph, Node

from fxopt_core import (
    add_node,
    class_path,
    inputs_of,
    iter_nodes,
    names_of,
    set_arguments,
    set_order,
)
from fxopt_rewrite.data.forms import Form, InexpressibleError, MalformedError, ValueReader, ValueWriter
from fxopt_rewrite.data.policies import is_identifier

OPERATIONS = frozenset({"placeholder", "get_attr", "call_function", "call_method", "call_module", "output"})
_UNSAFE = frozenset("\"'\\\n\r\0")
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def write_graph(
    graph: Graph,
    values: ValueWriter,
    extra: Callable[[Node], Mapping[str, Form]] = lambda node: {},
    nodes: Iterable[Node] | None = None,
) -> dict[str, Form]:
    """Return a graph as data, or only some of its nodes; ``extra`` returns further entries of a node's row.

    An `InexpressibleError` for a target or an argument names the node.
    """
    writer = _Writer(list(iter_nodes(graph) if nodes is None else nodes), values)
    rows = [{**writer.row(node), **extra(node)} for node in writer.nodes]
    return {
        "rows": rows,
        "users": writer.orders(lambda node: node.users, writer.users()),
        "inputs": writer.orders(inputs_of, writer.inputs),
        "names": sorted(names_of(graph).taken.difference(node.name for node in writer.nodes)),
        "counts": dict(names_of(graph).counts),
    }


class _Writer:
    """Writes the rows of one graph."""

    def __init__(self, nodes: list[Node], values: ValueWriter) -> None:
        self.nodes = nodes
        self.inputs: list[dict[int, None]] = []  # of each node, in the order of its arguments
        self._positions = {node: position for position, node in enumerate(nodes)}
        # Each reference and stack is one object, which a pickle writes once.
        self._references = [{"node": position} for position in range(len(nodes))]
        self._stacks: dict[object, Form] = {}
        self._values = values.with_own({Node: self._node, **dict.fromkeys(_SYMBOLIC, _refuse_symbolic)})

    def row(self, node: Node) -> dict[str, Form]:
        self.inputs.append({})
        target = node.target if isinstance(node.target, str) else self._part(node, "target", node.target)
        args = [self._part(node, "argument", argument) for argument in node.args]
        kwargs = {name: self._part(node, "argument", argument) for name, argument in node.kwargs.items()}
        if node.op == "call_method" and not self._values.names.is_method(target):
            raise InexpressibleError(f"node `{node.name}` calls method `{target}`, which tensors do not have")
        row = {"op": node.op, "name": node.name, "target": target, "args": args, "kwargs": kwargs}
        if node.type is not None:
            with suppress(InexpressibleError):  # torch does not read it
                row["type"] = self._values.write(node.type)
        return {**row, **self._origin(node)}

    def _part(self, node: Node, role: str, value: object) -> Form:
        try:
            return self._values.write(value)
        except InexpressibleError as error:
            raise InexpressibleError(f"node `{node.name}`, {role}: {error}") from error

    def _node(self, _: ValueWriter, node: Node) -> Form:
        position = self._positions[node]
        self.inputs[-1][position] = None
        return self._references[position]

    def _origin(self, node: Node) -> dict[str, Form]:
        kept: dict[str, Form] = {}
        trace, stack = node.meta.get("stack_trace"), node.meta.get("nn_module_stack")
        if isinstance(trace, str):
            kept["trace"] = trace
        if isinstance(stack, dict) and all(isinstance(entry, tuple) and len(entry) == 2 for entry in stack.values()):
            named = ((k, path, class_path(cls) if isinstance(cls, type) else cls) for k, (path, cls) in stack.items())
            entries = tuple(tuple(map(str, entry)) for entry in named)
            kind = "ordered_dict" if isinstance(stack, OrderedDict) else "dict"
            kept["stack"] = self._stacks.setdefault((kind, entries), {kind: [list(entry) for entry in entries]})
        return kept

    def users(self) -> list[dict[int, None]]:
        """Return the users of each node in the order that building the graph gives."""
        users: list[dict[int, None]] = [{} for _ in self.nodes]
        for position, inputs in enumerate(self.inputs):
            for value in inputs:
                users[value][position] = None
        return users

    def orders(self, actual: Callable[[Node], Iterable[Node]], natural: list[dict[int, None]]) -> list[Form]:
        """Return the positions and orders of nodes whose users or inputs are not in the natural order."""
        found = [[self._positions[other] for other in actual(node) if other in self._positions] for node in self.nodes]
        return [[position, order] for position, order in enumerate(found) if order != list(natural[position])]


def _refuse_symbolic(_: ValueWriter, value: object) -> NoReturn:
    raise InexpressibleError(
        f"the symbolic value {value} has no form; compute it by a node of the graph (`torch.ops.aten.sym_size.int`), "
        "or use a number"
    )


def read_graph(
    data: Form, values: ValueReader, extra: Callable[[Node, Mapping[str, Form]], None] = lambda node, row: None
) -> Graph:
    """Return the graph that `write_graph` has written; its code generator is torch's plain one.

    Malformed data raises `FxoptError`, `KeyError`, `TypeError` or `ValueError`.
    """
    graph = Graph()
    nodes: list[Node] = []
    taken: set[str] = set()
    values = values.with_own({"node": lambda _, position: _node_at(position, nodes)})
    for row in data["rows"]:
        if row["op"] not in OPERATIONS or not is_identifier(row["name"]) or row["name"] in taken:
            raise MalformedError(
                f"found {row['name']!r:.60} of operation {row['op']!r:.20}, which is no node of its own"
            )
        taken.add(row["name"])
        kind = values.read(row["type"]) if "type" in row else None
        add_node(graph, row["op"], _target(row["op"], row["target"], values), row["name"], kind)
    nodes += iter_nodes(graph)
    if not nodes or nodes[-1].op != "output":
        raise MalformedError("the graph has no output at its end")
    for node, row in zip(nodes, data["rows"], strict=True):
        _fill(node, row, values)
        extra(node, row)
    for key, of_node in (("users", lambda node: node.users), ("inputs", inputs_of)):
        for position, order in data[key]:
            _reorder(_node_at(position, nodes), of_node, [_node_at(other, nodes) for other in order])
    names_of(graph).taken.update(map(str, data["names"]))
    names_of(graph).counts.update({str(key): int(count) for key, count in data["counts"].items()})
    return graph


def _reorder(node: Node, of_node: Callable[[Node], dict[Node, None]], order: list[Node]) -> None:
    found = of_node(node)
    if len(order) != len(found) or set(order) != found.keys():
        raise MalformedError(f"node `{node.name}` has other users or inputs than those listed")
    set_order(found, order)


def _node_at(position: object, nodes: Sequence[Node]) -> Node:
    if type(position) is not int or not 0 <= position < len(nodes):
        raise MalformedError(f"there is no node number {position!r:.20}")
    return nodes[position]


def _target(op: str, form: Form, values: ValueReader) -> Any:
    if op == "call_function":
        target = values.read(form)
        if not callable(target):
            raise MalformedError(f"a node calls {form!r:.60}, which is no function")
        return target
    if not isinstance(form, str) or not _UNSAFE.isdisjoint(form):
        raise MalformedError(f"{form!r:.60} is not the target of a node")
    if op in ("placeholder", "output") and not is_identifier(form.lstrip("*")):
        raise MalformedError(f"{form!r:.60} is not the name of an input")
    if op == "call_method" and not values.names.is_method(form):
        raise MalformedError(f"a node calls method {form!r:.60}, which tensors do not have")
    return form


def _fill(node: Node, row: Mapping[str, Form], values: ValueReader) -> None:
    """Set the arguments and the origin of a node."""
    args = tuple(values.read(argument) for argument in row["args"])
    if node.target is getattr and not (len(args) > 1 and values.names.is_attribute(args[1])):
        raise MalformedError(f"node `{node.name}` reads attribute {args[1:]!r:.60}, which is private")
    if not all(map(is_identifier, row["kwargs"])):
        raise MalformedError(f"node `{node.name}` has {list(row['kwargs'])!r:.60} as names of arguments")
    set_arguments(node, args, {key: values.read(argument) for key, argument in row["kwargs"].items()})
    if "trace" in row:
        node.meta["stack_trace"] = str(row["trace"])
    if "stack" in row:
        node.meta["nn_module_stack"] = _stack(row["stack"])


def _stack(form: Form) -> dict[str, tuple[str, str]]:
    ((kind, entries),) = form.items()
    # Classes by name, as torch's own graphs have them.
    stack = ((str(key), (str(path), str(cls).replace(":", "."))) for key, path, cls in entries)
    return OrderedDict(stack) if kind == "ordered_dict" else dict(stack)
