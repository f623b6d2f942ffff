"""A tree of modules as rows of JSON, and back: names, classes of ``torch.nn``, attributes, and which tensor sits where.

Tensors are named by the keys under which the archive's program holds them. Modules are made without running any of
their code: a class of ``torch.nn`` or fxopt-onednn is looked up by name, and gets its attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from fxopt_core.module_state import plain_attributes

from .archive_values import Json, Unarchivable, from_json, to_json

_GRAPH_MODULE = "torch.fx.GraphModule"
_MODULE_STATE = frozenset(vars(nn.Module()))
_UNSAFE = frozenset("\"'\\\n\r\0")

WriteGraph = Callable[[Graph], Json]
ReadGraph = Callable[[Json], Graph]


def module_rows(root: GraphModule, left_out: Collection[str], write_graph: WriteGraph) -> list[Json]:
    """Return the modules of a graph module as rows, its own first; a module under several names is one row and names.

    Args:
        root: the graph module.
        left_out: names of children that the archive does not hold.
        write_graph: makes JSON of the graphs of graph modules within.

    Raises:
        Unarchivable: a module is not of ``torch.nn``, has hooks, or holds what cannot be written; the message names it.
    """
    names: dict[int, str] = {}
    keys: dict[int, str] = {}
    rows: list[Json] = []
    for name, module in root.named_modules(remove_duplicate=False):
        if name.split(".")[0] in left_out:
            continue
        if id(module) in names:
            rows.append({"name": name, "same": names[id(module)]})
            continue
        names[id(module)] = name
        row: dict[str, Json] = {"name": name, "training": module.training, "none": _absent(module)}
        row["parameters"], row["buffers"] = _tensors(name, module, keys)
        if module is not root:
            row.update(_described(name, module, write_graph))
        rows.append(row)
    return rows


def _absent(module: nn.Module) -> list[str]:
    return [name for name, child in module._modules.items() if child is None]


def _tensors(name: str, module: nn.Module, keys: dict[int, str]) -> tuple[Json, Json]:
    """Return the parameters and the buffers of one module with the first full name of each."""
    prefix = f"{name}." if name else ""

    def key(local: str, tensor: Tensor | None) -> str | None:
        return None if tensor is None else keys.setdefault(id(tensor), prefix + local)

    parameters = [[local, key(local, tensor)] for local, tensor in module._parameters.items()]
    transient = module._non_persistent_buffers_set
    buffers = [[local, key(local, tensor), local not in transient] for local, tensor in module._buffers.items()]
    return parameters, buffers


def _described(name: str, module: nn.Module, write_graph: WriteGraph) -> dict[str, Json]:
    hooks = [key for key, value in vars(module).items() if key.endswith(("_hooks", "_hooks_with_kwargs")) and value]
    if hooks:
        raise Unarchivable(f"module `{name}` has hooks ({', '.join(hooks)})")
    if isinstance(module, GraphModule):
        return {"class": _GRAPH_MODULE, "graph": write_graph(module.graph)}
    cls = _class_names().get(type(module))
    if cls is None:
        own = f"{type(module).__module__}.{type(module).__qualname__}"
        raise Unarchivable(f"module `{name}` is a {own}, none of torch.nn")
    attributes = []
    for key, value in plain_attributes(module):
        try:
            attributes.append([key, to_json(value)])
        except Unarchivable as error:
            raise Unarchivable(f"attribute `{key}` of module `{name}` holds {error}") from error
    return {"class": cls, "attributes": attributes}


def tree_of(rows: list[Json], tensors: Mapping[str, Tensor], read_graph: ReadGraph) -> nn.Module:
    """Return the tree that `module_rows` has written; its root is a plain ``nn.Module``.

    Raises:
        KeyError: a row lacks something.
        TypeError: a row has something of the wrong type.
        ValueError: it has not written these rows, or a tensor is not there.
    """
    made: dict[str, nn.Module] = {}
    for row in rows:
        name = row["name"]
        if not isinstance(name, str) or name in made or (not made) != (name == ""):
            raise ValueError(f"{name!r:.60} is no name of a module at this place")
        module = made[row["same"]] if "same" in row else _made(row, tensors, read_graph)
        made[name] = module
        if name:
            parent, _, local = name.rpartition(".")
            made[parent]._modules[_checked(local)] = module
    for row in rows:
        for local in row.get("none", ()):
            made[row["name"]]._modules.setdefault(_checked(local), None)
    return made[""]


def _made(row: Json, tensors: Mapping[str, Tensor], read_graph: ReadGraph) -> nn.Module:
    if row.get("class") == _GRAPH_MODULE:
        module: nn.Module = GraphModule(nn.Module(), read_graph(row["graph"]))
    else:
        module = _instance(row)
    module.training = bool(row["training"])
    for local, key in row["parameters"]:
        parameter = None if key is None else _tensor(tensors, key)
        if parameter is not None and not isinstance(parameter, nn.Parameter):
            raise ValueError(f"tensor {key!r} is no parameter")
        module._parameters[_checked(local)] = parameter
    for local, key, persistent in row["buffers"]:
        module._buffers[_checked(local)] = None if key is None else _tensor(tensors, key)
        if not persistent:
            module._non_persistent_buffers_set.add(local)
    return module


def _instance(row: Json) -> nn.Module:
    """Make a module of a class of torch.nn with its attributes, without calling its constructor."""
    name = row.get("class", "torch.nn.Module")
    cls = _classes().get(name)
    if cls is None:
        raise ValueError(f"{name!r} is no class of torch.nn")
    module: nn.Module = cls.__new__(cls)
    nn.Module.__init__(module)
    for key, value in row.get("attributes", ()):
        if not isinstance(key, str) or not key.isidentifier() or key in _MODULE_STATE or key.startswith("__"):
            raise ValueError(f"{key!r:.60} is no attribute that a layer has")
        vars(module)[key] = from_json(value)
    return module


def _tensor(tensors: Mapping[str, Tensor], key: str) -> Tensor:
    if key not in tensors:
        raise ValueError(f"there is no tensor {key!r} in the archive's program")
    return tensors[key]


def _checked(local: object) -> str:
    """Return a local name that generated code can hold between quotes."""
    if not isinstance(local, str) or not local or "." in local or not _UNSAFE.isdisjoint(local):
        raise ValueError(f"{local!r:.60} is no name of a module or tensor")
    return local


@cache
def _classes() -> Mapping[str, Any]:
    """Return the layers of ``torch.nn`` by name, and those of fxopt's own."""
    found: dict[str, Any] = {}
    for name in dir(nn):
        cls = getattr(nn, name)
        if isinstance(cls, type) and issubclass(cls, nn.Module) and not name.startswith("Lazy"):
            found[f"torch.nn.{name}"] = cls
    dynamic: Any = torch.nn.modules.linear.NonDynamicallyQuantizableLinear  # within nn.MultiheadAttention
    return {**found, "torch.nn.modules.linear.NonDynamicallyQuantizableLinear": dynamic, **_packed_layers()}


def _packed_layers() -> Mapping[str, Any]:
    """Return the layers of fxopt-onednn by name, where that is installed: they hold plain parameters and settings."""
    if find_spec("fxopt_onednn") is None:
        return {}
    family = import_module("fxopt_onednn")
    return {f"fxopt_onednn.{name}": getattr(family, name) for name in ("PackedConv2d", "PackedLinear")}


@cache
def _class_names() -> Mapping[type, str]:
    return {cls: name for name, cls in reversed(list(_classes().items()))}
