"""Pickling a graph module as its graph, so that names, order, marks and unused nodes survive.

torch pickles the generated code and traces it again. A module that `install_pickling` has touched pickles the rows of
its graph instead, in `pickle`, `torch.save` and multiprocessing alike, and so do its deep copies. Other modules
pickle as ever.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import TreeSpec, treespec_leaf

from fxopt_core._torch import PyTreeInfo, codegen_of
from fxopt_core.errors import FxoptError
from fxopt_core.graph import iter_nodes
from fxopt_core.ledger.marks import META_KEY
from fxopt_core.names import import_class, name_of
from fxopt_core.state.gc_pause import collector_paused
from fxopt_core.state.graph import GraphRows, own_classes

#: Incremented when older versions of this module could not read what this one writes.
FORMAT = 6

# What the graph has as well, or torch makes again; and what only matters to a new trace of the original.
_DROPPED = frozenset({"_graph", "_code", "_lineno_map", "_prologue_start", "_compiled_call_impl", "shape_env"})
_DROPPED |= {"_tracer_cls", "_tracer_extras"}
# `val` and `tensor_meta` are not stored: symbolic sizes, which they may hold, cannot be pickled.
_KEPT_META = (META_KEY, "stack_trace", "from_node")
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def install_pickling(graph_module: GraphModule) -> None:
    """Make a graph module, and every deep copy of it, pickle its graph. Doing it again changes nothing.

    >>> import pickle
    >>> graph_module = torch.fx.symbolic_trace(torch.nn.ReLU())
    >>> next(iter(graph_module.graph.nodes)).name = "any_name"
    >>> install_pickling(graph_module)
    >>> [node.name for node in pickle.loads(pickle.dumps(graph_module)).graph.nodes]
    ['any_name', 'relu', 'output']
    """
    for cls in own_classes(graph_module):
        if cls.__qualname__.endswith("GraphModuleImpl"):
            cls.__reduce_ex__ = _reduce_ex  # type: ignore[method-assign,assignment]  # as a class body would
            cls.__deepcopy__ = _deepcopy  # type: ignore[attr-defined]  # the same
    if install_pickling not in graph_module._deepcopy_hooks:
        graph_module._deepcopy_hooks.append(install_pickling)


def create(version: int, cls: Any, name: str) -> GraphModule:
    """Make an empty graph module for `fill`; pickle calls both."""
    if version > FORMAT:
        raise FxoptError(f"pickled in format {version}, and this fxopt-core reads formats up to {FORMAT}; upgrade it")
    graph_module: GraphModule = cls.__new__(cls)
    type(graph_module).__name__ = name
    return graph_module


def fill(graph_module: GraphModule, state: tuple[dict[str, Any], GraphRows, list[dict[str, Any]], Any]) -> None:
    """Give a graph module its attributes and its graph, and compile it."""
    attributes, rows, metas, codegen = state
    graph_module.__dict__.update(attributes)
    graph = Graph()
    with collector_paused():
        rows.fill(graph)
    for node, meta in zip(iter_nodes(graph), metas, strict=True):
        node.meta.update(meta)
    graph.set_codegen(codegen)
    graph.owning_module = graph_module
    graph_module.__dict__["_graph"] = graph
    graph_module.recompile()
    install_pickling(graph_module)


def _deepcopy(self: GraphModule, memo: dict[int, Any]) -> GraphModule:
    """Copy as torch does; the copy's tensors are plain ones in inference mode, too, so that writes are noticed."""
    own: Any = own_classes(self)[-1]  # the class that torch makes
    with torch.inference_mode(False):
        twin: GraphModule = super(own, self).__deepcopy__(memo)
    return twin


def _reduce_ex(self: GraphModule, protocol: int) -> tuple[Any, ...]:
    train = getattr(vars(self).get("train"), "__func__", None)
    if getattr(train, "__module__", None) == "torch.export.exported_program":
        found = "a graph module straight from `torch.export` cannot be pickled: torch drops the source of its checks"
        remedy = "make it with `fxopt_capture.capture`, or save the program with `torch.export.save`"
        raise FxoptError(f"{found}; {remedy}")
    base = next(cls for cls in type(self).__mro__ if not cls.__qualname__.endswith("GraphModuleImpl"))
    # What is dropped leaves its key, so that attributes come back in the same order.
    attributes = {key: None if key in _DROPPED else _form(value) for key, value in vars(self).items()}
    with collector_paused():
        rows = GraphRows(self.graph).apart(_form)
        metas = list(map(_kept_meta, iter_nodes(self.graph)))
    codegen = copy.copy(codegen_of(self.graph))
    vars(codegen).update({key: _form(value) for key, value in vars(codegen).items()})
    for module in self.modules():
        if isinstance(module, GraphModule):
            install_pickling(module)  # torch loses names in them too, and cannot trace what an export has made
    # pickle notes the new module before it restores the state, so that attributes may refer to the module itself.
    return create, (FORMAT, base, type(self).__name__), (attributes, rows, metas, codegen), None, None, fill


def _kept_meta(node: Node) -> dict[str, Any]:
    """Return what a pickle keeps of a node's ``meta``."""
    meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
    stack = node.meta.get("nn_module_stack")
    if isinstance(stack, dict):  # the classes by name, as in torch's own graphs: others may lack them
        meta["nn_module_stack"] = type(stack)((key, tuple(map(_class_text, entry))) for key, entry in stack.items())
    return meta


def _class_text(entry: object) -> object:
    return f"{entry.__module__}.{entry.__qualname__}" if isinstance(entry, type) else entry


class _Rebuilt:
    """The picklable form of an object: a function to call on loading, and its arguments."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._call


def _form(value: Any) -> Any:
    """Return what stands for an object in a pickle: functions and operators by name."""
    if isinstance(value, _SYMBOLIC):
        raise FxoptError(f"the symbolic value {value} cannot be pickled; compute it by a node (aten.sym_size.int)")
    if isinstance(value, TreeSpec):  # its own form warns of a deprecated class
        if value.is_leaf():
            return _Rebuilt(treespec_leaf)
        return _Rebuilt(TreeSpec, value.type, value.context, list(map(_form, value.children())))
    if type(value) is PyTreeInfo:
        return PyTreeInfo(*map(_form, value))
    # Older protocols of pickle have no memory formats, and none has operators and functions of C.
    name = str(value).replace(".", ":", 1) if isinstance(value, torch.memory_format) else name_of(value)
    return value if name is None else _Rebuilt(import_class, sys.intern(name))  # which is pickled once
