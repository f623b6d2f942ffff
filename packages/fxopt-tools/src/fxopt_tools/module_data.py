"""The modules and tensors of a graph module as JSON data, and back.

Modules of torch are made again from their attributes. Those of other classes are needed only where a graph calls them
as a whole; there they are written by the name of their class, and elsewhere they are plain containers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.nn.parameter import UninitializedParameter

from fxopt_core import PreconditionError
from fxopt_core.module_state import plain_attributes
from fxopt_tools.data_values import DataReader, DataWriter, function_name
from fxopt_tools.graph_data import called_modules, graph_data, read_graph

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def module_data(graph_module: GraphModule, writer: DataWriter, notes: list[str]) -> list[dict[str, Any]]:
    """Return the modules of a graph module, and the graph, as JSON data; what has to be left out is noted.

    Raises:
        PreconditionError: A module cannot be written.
    """
    needed = _called(graph_module)
    rows: list[dict[str, Any]] = []
    first: dict[int, str] = {}
    for name, module in graph_module.named_modules(remove_duplicate=False):
        if id(module) in first:
            rows.append({"name": name, "same": first[id(module)]})
            continue
        first[id(module)] = name
        whole = any(name == each or name.startswith(f"{each}.") for each in needed)
        rows.append({"name": name, **_row(name, module, whole, writer, notes)})
    return rows


def _called(graph_module: GraphModule) -> set[str]:
    """Return the full names of the modules that the graph calls, or hands on, as a whole."""
    found: set[str] = set()
    for prefix, inner in graph_module.named_modules(remove_duplicate=False):
        if isinstance(inner, GraphModule):
            modules = dict(inner.named_modules(remove_duplicate=False))
            targets = called_modules(inner.graph, modules)
            found |= {f"{prefix}.{name}" if prefix else name for name in targets}
    return found


def _row(name: str, module: nn.Module, whole: bool, writer: DataWriter, notes: list[str]) -> dict[str, Any]:
    own: dict[str, object] = dict(module._parameters)
    lazy = [key for key, tensor in own.items() if isinstance(tensor, UninitializedParameter)]
    if lazy:
        raise PreconditionError(f"`{name}.{lazy[0]}` is not initialised yet: call the model once first")
    parameters = [[key, writer.write(tensor)] for key, tensor in module._parameters.items()]
    kept = [key for key in module._buffers if key not in module._non_persistent_buffers_set]
    buffers = [[key, writer.write(tensor), key in kept] for key, tensor in module._buffers.items()]
    row: dict[str, Any] = {"training": module.training, "parameters": parameters, "buffers": buffers}
    if isinstance(module, GraphModule):
        modules = dict(module.named_modules(remove_duplicate=False))
        row["graph"] = graph_data(module.graph, modules, writer)
        attributes = _tensors(vars(module))
    elif whole:
        row["class"] = _class_name(name, module)
        attributes = plain_attributes(module)
    else:
        attributes = _tensors(vars(module))
    if whole and any(vars(module).get(key) for key in _HOOKS):
        notes.append(f"module `{name}` has hooks, which are left out")
    return {**row, "attributes": [[key, writer.write(value)] for key, value in attributes]}


def _tensors(attributes: Mapping[str, object]) -> list[tuple[str, object]]:
    return [(key, value) for key, value in attributes.items() if isinstance(value, Tensor)]


def _class_name(name: str, module: nn.Module) -> str:
    found = function_name(type(module))
    if found is None:
        cls = type(module)
        raise PreconditionError(
            f"module `{name}` is a {cls.__module__}.{cls.__qualname__}, expected a class that can be imported by its "
            "name: define it at the top of a module, other than the script that is run"
        )
    return found


def read_modules(rows: list[dict[str, Any]], reader: DataReader) -> GraphModule:
    """Return the graph module.

    Raises:
        PreconditionError: A module or a function in it is not to be trusted, or not to be had here.
    """
    made: dict[str, nn.Module] = {}
    for row in rows:
        name = row["name"]
        made[name] = made[row["same"]] if "same" in row else _module(row, reader)
        if name:
            parent, _, key = name.rpartition(".")
            made[parent]._modules[key] = made[name]
    for row in reversed(rows):
        module = made[row["name"]]
        if "graph" in row and isinstance(module, GraphModule):
            module.graph = read_graph(row["graph"], reader)
    root = made[""]
    assert isinstance(root, GraphModule)
    return root


def _module(row: Mapping[str, Any], reader: DataReader) -> nn.Module:
    if "graph" in row:
        module: nn.Module = GraphModule(nn.Module(), Graph())
    else:
        cls = reader.module_class(row["class"]) if "class" in row else nn.Module
        module = cls.__new__(cls)
        nn.Module.__init__(module)
    vars(module)["training"] = row["training"]
    for key, data in row["parameters"]:
        module._parameters[key] = reader.read(data)
    for key, data, persistent in row["buffers"]:
        module.register_buffer(key, reader.read(data), persistent)
    vars(module).update((key, reader.read(data)) for key, data in row["attributes"])
    return module
