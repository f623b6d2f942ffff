"""A graph as rows of data, and back, node for node: for archives and tables of sizes.

Each node is one row: operation, name, target, arguments with other nodes by position, and the origin of the node.
Fake tensors and shapes (`val`, `tensor_meta`) are left out, and users come back in the order of the graph. torch
generates Python from a graph, so reading one checks whatever becomes code.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch.fx import Graph, Node

from fxopt_core import (
    add_node,
    class_path,
    iter_nodes,
    set_arguments,
)
from fxopt_rewrite.data.forms import Form, InexpressibleError, MalformedError, ValueReader, ValueWriter
from fxopt_rewrite.data.policies import is_identifier

OPERATIONS = frozenset({"placeholder", "get_attr", "call_function", "call_method", "call_module", "output"})
#: Characters with which a target could end a string in generated code.
_UNSAFE = frozenset("\"'\\\n\r\0")


def write_graph(
    graph: Graph, values: ValueWriter, extra: Callable[[Node], Mapping[str, Form]] = lambda node: {}
) -> dict[str, Form]:
    """Return a graph as data; ``extra`` returns further entries of a node's row.

    An `InexpressibleError` for a target or an argument names the node.
    """
    positions = {node: position for position, node in enumerate(iter_nodes(graph))}
    values = replace(values, own={**values.own, Node: lambda _, node: {"node": positions[node]}})
    return {"rows": [{**_row(node, values), **extra(node)} for node in positions]}


def _row(node: Node, values: ValueWriter) -> dict[str, Form]:
    def part(role: str, value: object) -> Form:
        try:
            return values.write(value)
        except InexpressibleError as error:
            raise InexpressibleError(f"node `{node.name}`, {role}: {error}") from error

    target = node.target if isinstance(node.target, str) else part("target", node.target)
    args = [part("argument", argument) for argument in node.args]
    kwargs = {name: part("argument", argument) for name, argument in node.kwargs.items()}
    if node.op == "call_method" and not values.names.is_method(target):
        raise InexpressibleError(f"node `{node.name}` calls method `{target}`, which tensors do not have")
    row = {"op": node.op, "name": node.name, "target": target, "args": args, "kwargs": kwargs}
    if node.type is not None:
        with suppress(InexpressibleError):  # torch does not read it
            row["type"] = values.write(node.type)
    trace, stack = node.meta.get("stack_trace"), node.meta.get("nn_module_stack")
    if isinstance(trace, str):
        row["trace"] = trace
    if isinstance(stack, dict) and all(isinstance(entry, tuple) and len(entry) == 2 for entry in stack.values()):
        named = ((k, path, class_path(cls) if isinstance(cls, type) else cls) for k, (path, cls) in stack.items())
        kind = "ordered_dict" if isinstance(stack, OrderedDict) else "dict"
        row["stack"] = {kind: [list(map(str, entry)) for entry in named]}
    return row


def read_graph(
    data: Form, values: ValueReader, extra: Callable[[Node, Mapping[str, Form]], None] = lambda node, row: None
) -> Graph:
    """Return the graph that `write_graph` has written; its code generator is torch's plain one.

    Malformed data raises `FxoptError`, `KeyError`, `TypeError` or `ValueError`.
    """
    graph = Graph()
    nodes: list[Node] = []
    taken: set[str] = set()
    values = replace(values, own={**values.own, "node": lambda _, position: _node_at(position, nodes)})
    for row in data["rows"]:
        if row["op"] not in OPERATIONS or not is_identifier(row["name"]) or row["name"] in taken:
            raise MalformedError(f"found {row['name']!r:.60} of operation {row['op']!r:.20}, which is not a valid node")
        taken.add(row["name"])
        kind = values.read(row["type"]) if "type" in row else None
        add_node(graph, row["op"], _target(row["op"], row["target"], values), row["name"], kind)
    nodes += iter_nodes(graph)
    if not nodes or nodes[-1].op != "output":
        raise MalformedError("the graph has no output at its end")
    for node, row in zip(nodes, data["rows"], strict=True):
        _fill(node, row, values)
        extra(node, row)
    return graph


def _node_at(position: object, nodes: Sequence[Node]) -> Node:
    if type(position) is not int or not 0 <= position < len(nodes):
        raise MalformedError(f"there is no node number {position!r:.20}")
    return nodes[position]


def _target(op: str, form: Form, values: ValueReader) -> Any:
    if op == "call_function":
        target = values.read(form)
        if not callable(target):
            raise MalformedError(f"a node calls {form!r:.60}, which is not a function")
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
        ((kind, entries),) = row["stack"].items()
        # Classes by name, as torch's own graphs have them.
        stack = ((str(key), (str(path), str(cls).replace(":", "."))) for key, path, cls in entries)
        node.meta["nn_module_stack"] = OrderedDict(stack) if kind == "ordered_dict" else dict(stack)
