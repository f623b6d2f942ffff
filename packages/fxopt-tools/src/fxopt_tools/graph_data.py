"""A graph as JSON data, and back: nodes with names, arguments, source lines and what is known of their values.

Marks and records of earlier passes are left out, and so are guards, such as ``torch.export`` puts in. Inputs and
outputs are flat: one placeholder, one value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen, _PyTreeCodeGen
from torch.fx.passes.shape_prop import TensorMetadata

from fxopt_core import PreconditionError, iter_nodes
from fxopt_core.graph import generator_class
from fxopt_core.graph_building import add_node
from fxopt_tools.data_values import DataReader, DataWriter, function_name, is_plain_method
from fxopt_tools.inputs import Inputs

_TARGET = re.compile(r"\w+(\.\w+)*")
_OPERATIONS = ("placeholder", "get_attr", "call_function", "call_method", "call_module", "output")


def graph_data(graph: Graph, modules: Mapping[str, nn.Module], writer: DataWriter) -> list[Any]:
    """Return the nodes of a graph as JSON data.

    Raises:
        PreconditionError: A node calls a function that cannot be imported by its name.
    """
    nodes = [node for node in iter_nodes(graph) if not _is_guard(node, modules)]
    numbers = {node: number for number, node in enumerate(nodes)}
    return [_row(node, numbers, writer) for node in nodes]


def _is_guard(node: Node, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a node calls a module that only looks at inputs: no guard is one of torch.nn's."""
    module = modules.get(str(node.target)) if node.op == "call_module" else None
    return module is not None and not node.users and not type(module).__module__.startswith("torch.nn.")


def called_modules(graph: Graph, modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the names of the modules that a graph calls, or hands on, as a whole; but for guards and other graphs."""
    nodes = (node for node in iter_nodes(graph) if node.op in ("call_module", "get_attr"))
    return {
        str(node.target)
        for node in nodes
        if str(node.target) in modules
        and not isinstance(modules[str(node.target)], GraphModule)
        and not _is_guard(node, modules)
    }


def _row(node: Node, numbers: Mapping[Node, int], writer: DataWriter) -> dict[str, Any]:
    target = node.target if isinstance(node.target, str) else function_name(node.target)
    if target is None:
        raise PreconditionError(
            f"node `{node.name}` calls {node.target}, expected a function that can be imported by its name: define it "
            "at the top of a module, other than the script that is run"
        )
    args, kwargs = writer.write(node.args, numbers.__getitem__), writer.write(dict(node.kwargs), numbers.__getitem__)
    row = {"name": node.name, "op": node.op, "target": target, "args": args, "kwargs": kwargs}
    trace = node.meta.get("stack_trace")
    return {**row, **({"trace": trace} if isinstance(trace, str) else {}), **_value(node)}


def _value(node: Node) -> dict[str, Any]:
    """Return what is known of a node's tensor; sizes that were symbols are those of the example."""
    for key in ("val", "tensor_meta"):
        value: Any = node.meta.get(key)
        if isinstance(value, (Tensor, TensorMetadata)):
            stride = value.stride if isinstance(value, TensorMetadata) else value.stride()
            sizes, strides = [*map(_size, value.shape)], [*map(_size, stride)]
            if None not in sizes and None not in strides:
                dtype = str(value.dtype).removeprefix("torch.")
                return {"value": [dtype, sizes, strides, bool(value.requires_grad)]}
    return {}


def _size(size: object) -> int | None:
    if isinstance(size, torch.SymInt):
        hint = getattr(size.node, "hint", None)
        return hint if isinstance(hint, int) else None
    return size if isinstance(size, int) else None


def read_graph(rows: list[Any], reader: DataReader) -> Graph:
    """Return a graph.

    Raises:
        PreconditionError: A node calls what is not to be trusted, or is none.
    """
    graph = Graph()
    for row in rows:
        if row["op"] not in _OPERATIONS or not str(row["name"]).isidentifier():
            raise PreconditionError(f"{str(row['name'])[:40]!r} of operation {row['op']!r:.40} is no node of a graph")
        add_node(graph, row["op"], _target(row, reader), row["name"])
    nodes = list(iter_nodes(graph))
    for node, row in zip(nodes, rows, strict=True):
        args, kwargs = reader.read(row["args"], nodes), reader.read(row["kwargs"], nodes)
        if not all(str(key).isidentifier() for key in kwargs):  # code is generated from them
            raise PreconditionError(f"node `{node.name}` has arguments of names that are none: {str([*kwargs])[:80]}")
        node._update_args_kwargs(args, kwargs)
        node.meta.update(_meta(row))
        _check_attribute(node, reader)
    return graph


def _target(row: Mapping[str, Any], reader: DataReader) -> Any:
    target = row["target"]
    if row["op"] == "call_function":
        return reader.named(target)
    text = str(target)
    if row["op"] == "call_method" and not (reader.trusted or is_plain_method(text)):
        raise PreconditionError(f"the reproducer calls method `{text[:40]}`, none of tensors: see trusted=True")
    if not _TARGET.fullmatch(text):
        raise PreconditionError(f"{text[:40]!r} is no target of a node")
    return text


def _check_attribute(node: Node, reader: DataReader) -> None:
    if node.target is getattr and not reader.trusted and str(node.args[1]).startswith("_"):
        raise PreconditionError(f"node `{node.name}` reads the private attribute {node.args[1]!r}: see trusted=True")


def _meta(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if "trace" in row:
        yield "stack_trace", row["trace"]
    if "value" in row:
        name, sizes, strides, requires_grad = row["value"]
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise PreconditionError(f"torch.{name} is no dtype")
        form = torch.contiguous_format
        yield (
            "tensor_meta",
            TensorMetadata(torch.Size(sizes), dtype, requires_grad, tuple(strides), form, False, {}),
        )


def placeholder_values(graph_module: GraphModule, inputs: Inputs) -> list[Any]:
    """Return the value of each placeholder when a graph module is called with inputs.

    Raises:
        PreconditionError: It does not take them.
    """
    graph = Graph()
    codegen = graph_module.graph._codegen
    copies = [graph.node_copy(node) for node in iter_nodes(graph_module.graph) if node.op == "placeholder"]
    for node in copies:
        node.meta.clear()
    graph.output(tuple(copies))
    if isinstance(codegen, _PyTreeCodeGen):
        graph.set_codegen(_PyTreeCodeGen(codegen.pytree_info._replace(out_spec=None)))
    elif generator_class(graph_module.graph) is not CodeGen:
        raise PreconditionError(f"the graph has a code generator of its own, {type(codegen).__name__}")
    try:
        return list(GraphModule(nn.Module(), graph)(*inputs.args, **inputs.kwargs))
    except Exception as error:
        raise PreconditionError(
            f"the graph module does not take the inputs: {type(error).__name__}: {error}"
        ) from error
