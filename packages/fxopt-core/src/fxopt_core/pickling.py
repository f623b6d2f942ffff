"""Pickling a graph module as its graph, so that names, order, marks and unused nodes survive.

torch pickles the generated code and traces it again. A module that `install` has touched pickles a table of its nodes
instead, in `pickle`, `torch.save` and multiprocessing alike, and so do its deep copies; all other modules are as ever.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import TreeSpec
from torch.utils.hooks import RemovableHandle

from fxopt_core.errors import FxoptError
from fxopt_core.export_guards import guards_reference
from fxopt_core.export_inputs import function_counterpart, hook_counterpart
from fxopt_core.graph_table import META_KEY, GraphTable, read_table, write_table
from fxopt_core.references import Prober, Rebuilt, describe, spec_reference
from fxopt_core.snapshot_graph import own_classes

FORMAT = 1
"""Raised when older versions of this module could not read what this one writes."""

_MADE_AGAIN = frozenset({"_graph", "_code", "_lineno_map", "_prologue_start", "_compiled_call_impl"})
_TENSORS = frozenset({"_parameters", "_buffers"})
_DEFAULTS: dict[str, Any] = {"_tracer_cls": None, "_tracer_extras": {}}
_IMPORTABLE = (
    "classes and functions pickle by name: define it at the top of a module, or undo what has replaced it "
    "(torch.nn.utils.parametrize.remove_parametrizations)"
)
_REMEDY = "remove it, or use functions and classes that are defined at the top of a module"


def install(graph_module: GraphModule) -> None:
    """Make a graph module, and every deep copy of it, pickle its graph. Doing it again changes nothing.

    Raises:
        FxoptError: the class of the module was replaced by one that it shares with others.

    >>> import pickle, torch
    >>> graph_module = torch.fx.symbolic_trace(nn.ReLU())
    >>> next(iter(graph_module.graph.nodes))._rename("any_name")
    >>> install(graph_module)
    >>> [node.name for node in pickle.loads(pickle.dumps(graph_module)).graph.nodes]
    ['any_name', 'relu', 'output']
    """
    cls = _own_class(graph_module)
    for name, function in (("__reduce_ex__", _reduce_ex), ("__copy__", _copy)):
        setattr(cls, name, function)
    if install not in graph_module._deepcopy_hooks:
        graph_module._deepcopy_hooks.append(install)


def is_installed(graph_module: GraphModule) -> bool:
    """Whether a graph module pickles its graph.

    >>> import torch
    >>> is_installed(torch.fx.symbolic_trace(nn.ReLU()))
    False
    """
    return type(graph_module).__reduce_ex__ is _reduce_ex


def create(version: int, *arguments: Any) -> GraphModule:
    """Make the empty graph module that `fill` fills; called when a pickle is read.

    Raises:
        FxoptError: a newer version wrote the pickle.
    """
    if version > FORMAT:
        raise FxoptError(
            f"this graph module was pickled in format {version}, and this version reads formats up to {FORMAT}; "
            "upgrade fxopt-core"
        )
    cls, name = arguments
    graph_module: GraphModule = cls.__new__(cls)
    type(graph_module).__name__ = name
    return graph_module


def fill(graph_module: GraphModule, state: tuple[dict[str, Any], GraphTable]) -> None:
    """Give a graph module its attributes and its graph, and compile it; called when a pickle is read."""
    attributes, table = state
    graph_module.__dict__.update(attributes)
    graph = read_table(table)
    graph._tracer_cls = attributes.get("_tracer_cls")
    graph.owning_module = graph_module
    graph_module.__dict__["_graph"] = graph
    graph_module.recompile()
    install(graph_module)
    _keep_hook_numbers_apart(graph_module)


def _own_class(graph_module: GraphModule) -> type[GraphModule]:
    for cls in own_classes(graph_module):
        if cls.__qualname__.endswith("GraphModuleImpl"):
            return cls
    raise FxoptError(
        f"the graph module's class was replaced by {type(graph_module).__qualname__}, which it does not own; keep the "
        "class that torch makes for each graph module"
    )


def _base(graph_module: GraphModule) -> Any:
    """The class that torch derives one class for each graph module from."""
    return next(cls for cls in type(graph_module).__mro__ if not cls.__qualname__.endswith("GraphModuleImpl"))


def _copy(self: GraphModule) -> GraphModule:
    """Copy as torch does, and let the copy, which shares the graph, pickle it too."""
    twin: GraphModule = _base(self).__copy__(self)
    install(twin)
    return twin


def _reduce_ex(self: GraphModule, protocol: int) -> tuple[Any, ...]:
    prober = Prober(protocol)
    base = _base(self)
    _demand(prober, base, "the class of the graph module", _IMPORTABLE)
    attributes = {key: _attribute(self, key, value, prober) for key, value in vars(self).items()}
    for name, module in self.named_modules():
        if isinstance(module, GraphModule):
            install(module)  # torch loses names in them too, and cannot trace what an export has made
        elif attributes["_modules"].get(name, module) is module:
            _check_submodule(name, module, prober)
    state = attributes, write_table(self.graph, prober)
    return create, (FORMAT, base, type(self).__name__), state, None, None, fill


def bind(function: Any, graph_module: GraphModule) -> MethodType:
    """Bind a function to a graph module as a method of it; called when a pickle is read."""
    return MethodType(function, graph_module)


def _attribute(graph_module: GraphModule, key: str, value: Any, prober: Prober) -> Any:
    """Return what stands for one attribute of the graph module in a pickle."""
    if key in _MADE_AGAIN or key == "shape_env":
        return None
    if key in _TENSORS or isinstance(value, (Tensor, nn.Module)):
        return value
    if key == "_modules":
        codegen = graph_module.graph._codegen
        return {name: child and (guards_reference(child, codegen) or child) for name, child in value.items()}
    if key == "meta":
        return {name: entry for name, entry in value.items() if name == META_KEY or prober.obstacle(entry) is None}
    if key in _DEFAULTS:
        return value if prober.obstacle(value) is None else copy.copy(_DEFAULTS[key])
    if isinstance(value, TreeSpec):
        return spec_reference(value)
    if isinstance(value, MethodType) and value.__self__ is graph_module:
        function = function_counterpart(value)
        _demand(prober, function, f"attribute {key!r} of the graph module", _IMPORTABLE)
        return Rebuilt(bind, function, graph_module)
    if key.endswith("_hooks") and isinstance(value, dict):
        value = type(value)((number, hook_counterpart(hook, graph_module.graph)) for number, hook in value.items())
    _demand(prober, value, f"attribute {key!r} of the graph module", _REMEDY)
    return value


def _check_submodule(name: str, module: nn.Module, prober: Prober) -> None:
    """Find what pickle would stop at further down, where its message would name neither module nor attribute."""
    cls: Any = type(module)
    _demand(prober, cls, f"the class of module {name!r}", _IMPORTABLE)
    if cls.__getstate__ is nn.Module.__getstate__ and cls.__reduce_ex__ is object.__reduce_ex__:
        for key, value in vars(module).items():
            if key not in _TENSORS and key != "_modules":
                _demand(prober, value, f"attribute {key!r} of module {name!r}", _REMEDY)


def _demand(prober: Prober, value: object, what: str, remedy: str) -> None:
    obstacle = prober.obstacle(value)
    if obstacle is not None:
        raise FxoptError(f"{what} cannot be pickled: {describe(value)} ({obstacle}); {remedy}") from obstacle


def _keep_hook_numbers_apart(graph_module: GraphModule) -> None:
    """Let hooks that are registered from now on not replace those that came with the pickle."""
    for module in graph_module.modules():
        for key, hooks in vars(module).items():
            if key.endswith("_hooks") and isinstance(hooks, dict) and hooks:
                RemovableHandle.next_id = max(RemovableHandle.next_id, 1 + max(hooks))
