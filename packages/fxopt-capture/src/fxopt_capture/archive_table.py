"""A graph as rows of JSON, and back, node for node with names and marks.

The rows hold no code. What reading them makes is checked, since torch generates Python from it: names are identifiers,
targets are functions that `archive_targets` knows or attributes that the modules have.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.graph import CodeGen, _PyTreeCodeGen

from fxopt_core.graph import generator_class, iter_nodes
from fxopt_core.graph_building import add_node, set_order
from fxopt_core.marks import NodeTag, set_tag, tag_of

from .archive_targets import is_attribute, is_method, target_name, target_of
from .archive_values import Json, Unarchivable, from_json, to_json

_OPERATIONS = frozenset({"placeholder", "get_attr", "call_function", "call_method", "call_module", "output"})
_TYPES = (torch.Tensor, int, float, bool, str)


def graph_rows(graph: Graph, write_tag: Callable[[NodeTag], Json]) -> Json:
    """Return a graph as what `json` writes.

    Raises:
        Unarchivable: a node calls or holds what an archive cannot; the message names it.
    """
    generator = generator_class(graph)
    if generator not in (CodeGen, _PyTreeCodeGen):
        raise Unarchivable(f"the graph has a code generator of its own, {type(graph._codegen).__qualname__}")
    nodes = list(iter_nodes(graph))
    positions = {node: index for index, node in enumerate(nodes)}
    rows = [_row(node, positions, write_tag) for node in nodes]
    names = graph._graph_namespace
    return {
        "pytree": generator is _PyTreeCodeGen,
        "rows": rows,
        "orders": list(_orders(nodes, positions)),
        "names": sorted(names._used_names.difference(node.name for node in nodes)),
        "counts": dict(names._base_count),
    }


def _row(node: Node, positions: Mapping[Node, int], write_tag: Callable[[NodeTag], Json]) -> Json:
    target = node.target if isinstance(node.target, str) else target_name(node.target)
    if target is None:
        raise Unarchivable(f"node `{node.name}` calls {node.target}, which is no function of torch")
    if node.op == "call_method" and not is_method(target):
        raise Unarchivable(f"node `{node.name}` calls method `{target}`, which is none of tensors")
    row: dict[str, Json] = {"op": node.op, "name": node.name, "target": target}
    try:
        row["args"] = [to_json(argument, positions.__getitem__) for argument in node.args]
        row["kwargs"] = {key: to_json(argument, positions.__getitem__) for key, argument in node.kwargs.items()}
    except Unarchivable as error:
        raise Unarchivable(f"node `{node.name}` has {error} among its arguments") from error
    if node.type in _TYPES:
        row["type"] = target_name(node.type)
    tag = tag_of(node)
    if tag != NodeTag():
        row["tag"] = write_tag(tag)
    return {**row, **_meta(node)}


def _meta(node: Node) -> dict[str, Json]:
    kept: dict[str, Json] = {}
    trace, stack = node.meta.get("stack_trace"), node.meta.get("nn_module_stack")
    if isinstance(trace, str):
        kept["trace"] = trace
    if isinstance(stack, dict):
        kept["stack"] = [[str(key), str(path), _class_name(cls)] for key, (path, cls) in stack.items()]
    return kept


def _class_name(cls: object) -> str:
    return f"{cls.__module__}.{cls.__qualname__}" if isinstance(cls, type) else str(cls)


def _orders(nodes: list[Node], positions: Mapping[Node, int]) -> Any:
    """Yield the nodes whose users are in another order than that of the graph, with these users."""
    for index, node in enumerate(nodes):
        users = [positions[user] for user in node.users if user in positions]
        if users != sorted(users):
            yield [index, users]


def read_graph(data: Json, read_tag: Callable[[Json], NodeTag]) -> Graph:
    """Return the graph that `graph_rows` has written; its code generator is torch's plain one.

    Raises:
        KeyError: a row lacks something.
        TypeError: a row has something of the wrong type.
        ValueError: it has not written these rows, or a node calls something that an archive may not.
    """
    graph = Graph()
    taken: set[str] = set()
    for row in data["rows"]:
        if row["op"] not in _OPERATIONS or not _is_name(row["name"]) or row["name"] in taken:
            raise ValueError(f"{row['name']!r:.60} is no name of a node that may stand here")
        taken.add(row["name"])
        kind = target_of(row["type"]) if "type" in row else None
        add_node(graph, row["op"], _target(row["op"], row["target"]), row["name"], kind)
    nodes = list(iter_nodes(graph))
    if not nodes or nodes[-1].op != "output":
        raise ValueError("the graph has no output at its end")
    for node, row in zip(nodes, data["rows"], strict=True):
        _fill(node, row, nodes, read_tag)
    for index, users in data["orders"]:
        order = [nodes[user] for user in users]
        if len(order) != len(nodes[index].users) or set(order) != nodes[index].users.keys():
            raise ValueError(f"node `{nodes[index].name}` has other users than those listed")
        set_order(nodes[index].users, order)
    graph._graph_namespace._used_names.update(map(str, data["names"]))
    graph._graph_namespace._base_count.update({str(key): int(count) for key, count in data["counts"].items()})
    return graph


def is_archivable(op: str, name: object, target: object) -> bool:
    """Whether an archive may hold a node of this operation, name and target."""
    if op == "call_function":
        return _is_name(name) and target_name(target) is not None
    return _is_name(name) and isinstance(target, str) and (op != "call_method" or is_method(target))


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def _target(op: str, name: object) -> Any:
    if op == "call_function":
        return target_of(name)
    if not isinstance(name, str):
        raise ValueError(f"{name!r:.60} is no target of a node")
    if op in ("placeholder", "output") and not _is_name(name):
        raise ValueError(f"{name!r:.60} is no name of an input")
    if op == "call_method" and not is_method(name):
        raise ValueError(f"a node calls method {name!r}, which is none of tensors")
    return name


def _fill(node: Node, row: Json, nodes: Sequence[Node], read_tag: Callable[[Json], NodeTag]) -> None:
    """Give a node its arguments and what is known of it."""
    args = tuple(from_json(argument, nodes) for argument in row["args"])
    if node.target is getattr and (len(args) < 2 or not is_attribute(args[1])):
        raise ValueError(f"node `{node.name}` reads attribute {args[1:]!r:.60}, which an archive may not")
    if not all(map(_is_name, row["kwargs"])):
        raise ValueError(f"node `{node.name}` has {list(row['kwargs'])!r:.60} as names of arguments")
    node._update_args_kwargs(args, {key: from_json(argument, nodes) for key, argument in row["kwargs"].items()})
    if "tag" in row:
        set_tag(node, read_tag(row["tag"]))
    if "trace" in row:
        node.meta["stack_trace"] = str(row["trace"])
    if "stack" in row:
        node.meta["nn_module_stack"] = {str(key): (str(path), str(cls)) for key, path, cls in row["stack"]}


def check_names(graph: Graph, root: nn.Module) -> None:
    """Check that every node reads what the modules have: code is generated from these names.

    Raises:
        ValueError: a node names something else.
    """
    modules = dict(root.named_modules(remove_duplicate=False))
    for node in iter_nodes(graph):
        if node.op not in ("get_attr", "call_module"):
            continue
        path, _, name = str(node.target).rpartition(".")
        owner = modules.get(path)
        has = owner is not None and (name in owner._modules or name in owner._parameters or name in owner._buffers)
        if not has or (node.op == "call_module" and node.target not in modules):
            raise ValueError(f"node `{node.name}` names `{node.target}`, which no module has")
