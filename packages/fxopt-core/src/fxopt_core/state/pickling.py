"""Pickling a graph module as its graph, so that names, order, marks and unused nodes survive.

torch pickles the generated code and traces it again. A module that `install_pickling` has touched pickles the rows of
its graph instead, in `pickle`, `torch.save` and multiprocessing alike, and so do its deep copies. Other modules
pickle as ever.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import TreeSpec, treespec_leaf

from fxopt_core._torch import PyTreeInfo, codegen_of
from fxopt_core.errors import FxoptError
from fxopt_core.graph import iter_nodes
from fxopt_core.ledger.marks import META_KEY
from fxopt_core.names import class_path, import_class, name_of
from fxopt_core.state.gc_pause import collector_paused
from fxopt_core.state.graph import GraphRows, own_classes

FORMAT = 6
"""Incremented when older versions of this module could not read what this one writes."""

# What the graph has as well, or torch makes again; and what only matters to a new trace of the original.
_DROPPED = frozenset({"_graph", "_code", "_lineno_map", "_prologue_start", "_compiled_call_impl", "shape_env"})
_DROPPED |= {"_tracer_cls", "_tracer_extras"}
_KEPT_META = (META_KEY, "stack_trace", "from_node", "source_fn_stack", "custom")
_STACK = "nn_module_stack"
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


def install_pickling(graph_module: GraphModule) -> None:
    """Make a graph module, and every deep copy of it, pickle its graph. Doing it again changes nothing.

    Raises:
        FxoptError: the class of the module was replaced by one that it shares with others.

    >>> graph_module = torch.fx.symbolic_trace(nn.ReLU())
    >>> next(iter(graph_module.graph.nodes)).name = "any_name"
    >>> install_pickling(graph_module)
    >>> [node.name for node in pickle.loads(pickle.dumps(graph_module)).graph.nodes]
    ['any_name', 'relu', 'output']
    """
    own = [cls for cls in own_classes(graph_module) if cls.__qualname__.endswith("GraphModuleImpl")]
    if not own:
        found = f"the graph module's class was replaced by {type(graph_module).__qualname__}, which it does not own"
        raise FxoptError(f"{found}; keep the class that torch makes for each graph module")
    for name, method in (("__reduce_ex__", _reduce_ex), ("__copy__", _copy), ("__deepcopy__", _deepcopy)):
        setattr(own[0], name, method)
    if install_pickling not in graph_module._deepcopy_hooks:
        graph_module._deepcopy_hooks.append(install_pickling)


def create(version: int, *arguments: Any) -> GraphModule:
    """Make an empty graph module for `fill`; pickle calls both."""
    if version > FORMAT:
        found = f"this graph module was pickled in format {version}"
        raise FxoptError(f"{found}, and this version reads formats up to {FORMAT}; upgrade fxopt-core")
    cls, name = arguments
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


def _base(graph_module: GraphModule) -> Any:
    """Return the class from which torch derives a class for each graph module."""
    return next(cls for cls in type(graph_module).__mro__ if not cls.__qualname__.endswith("GraphModuleImpl"))


def _copy(self: GraphModule) -> GraphModule:
    """Copy as torch does, and let the copy, which shares the graph, pickle it too."""
    twin: GraphModule = _base(self).__copy__(self)
    install_pickling(twin)
    return twin


def _deepcopy(self: GraphModule, memo: dict[int, Any]) -> GraphModule:
    """Copy as torch does; the copy's tensors are plain ones in inference mode, too."""
    with torch.inference_mode(False):
        twin: GraphModule = _base(self).__deepcopy__(self, memo)
    return twin


def _reduce_ex(self: GraphModule, protocol: int) -> tuple[Any, ...]:
    train = getattr(vars(self).get("train"), "__func__", None)
    if getattr(train, "__module__", None) == "torch.export.exported_program":
        found = "a graph module straight from `torch.export` cannot be pickled: torch drops the source of its checks"
        remedy = "make it with `fxopt_capture.capture`, or save the program with `torch.export.save`"
        raise FxoptError(f"{found}; {remedy}")
    base, form = _base(self), _Forms()
    attributes = {key: None if key in _DROPPED else form(value) for key, value in vars(self).items()}
    attributes["meta"] = {key: value for key, value in self.meta.items() if _obstacle(value) is None}
    with collector_paused():
        rows = GraphRows(self.graph).apart(form)
        metas = list(map(_kept_meta, iter_nodes(self.graph)))
    codegen = copy.copy(codegen_of(self.graph))
    vars(codegen).update({key: form(value) for key, value in vars(codegen).items()})

    # What pickle would stop at, where its message names neither node nor module.
    parts: list[tuple[str, object]] = [("its class", base), ("its code generator", codegen)]
    parts += [(f"its attribute {key!r}", value) for key, value in attributes.items()]
    parts += [(f"node `{row[2]}`", row) for row in rows.rows]
    for name, module in self.named_modules():
        cls: Any = type(module)
        if isinstance(module, GraphModule):
            install_pickling(module)  # torch loses names in them too, and cannot trace what an export has made
        elif cls.__getstate__ is nn.Module.__getstate__ and cls.__reduce_ex__ is object.__reduce_ex__:
            parts.append((f"module {name!r}", (cls, vars(module))))
    for what, part in () if _obstacle(parts) is None else parts:
        obstacle = _obstacle(part)
        if obstacle is not None:
            remedy = "Remove it, or use functions and classes that are defined at the top of a module"
            raise FxoptError(f"the graph module cannot be pickled: {what}: {obstacle}. {remedy}") from obstacle
    return create, (FORMAT, base, type(self).__name__), (attributes, rows, metas, codegen), None, None, fill


class _Probe(pickle.Pickler):
    """A pickler that passes over tensors and modules, which are large and pickled on their own."""

    def persistent_id(self, obj: Any) -> str | None:
        if isinstance(obj, _SYMBOLIC):
            raise TypeError(f"the symbolic value {obj} has no text form; compute it by a node (aten.sym_size.int)")
        return "" if isinstance(obj, (Tensor, nn.Module)) else None


def _obstacle(value: object) -> Exception | None:
    """Return the error of pickling a value, without its tensors and modules."""
    try:
        _Probe(io.BytesIO()).dump(value)
    except Exception as error:  # whatever pickling somebody's object raises
        return error
    return None


def _kept_meta(node: Node) -> dict[str, Any]:
    """Return what a pickle keeps of a node's ``meta``."""
    meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta and _obstacle(node.meta[key]) is None}
    stack = node.meta.get(_STACK)
    if isinstance(stack, dict):  # the classes by name, as in torch's own graphs: others may lack them
        meta[_STACK] = type(stack)((key, tuple(map(_class_text, entry))) for key, entry in stack.items())
    return meta


def _class_text(part: object) -> object:
    return class_path(part).replace(":", ".") if isinstance(part, type) else part


class _Rebuilt:
    """The picklable form of an object: a function to call on loading, and its arguments."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._call


class _Forms:
    """Returns what stands for an object in one pickle: functions and operators by name, one form for each."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        if type(value) in _ATOMS:
            return value
        if id(value) not in self._made:
            self._made[id(value)] = self._form(value)
        return self._made[id(value)]

    def _form(self, value: Any) -> Any:
        if isinstance(value, TreeSpec):  # its own form warns of a deprecated class
            if value.is_leaf():
                return _Rebuilt(treespec_leaf)
            return _Rebuilt(TreeSpec, value.type, value.context, list(map(self, value.children())))
        if type(value) is PyTreeInfo:
            return PyTreeInfo(*map(self, value))
        # Older protocols of pickle have no memory formats, and none has operators and functions of C.
        is_format = isinstance(value, torch.memory_format)
        name = str(value).replace(".", ":", 1) if is_format else name_of(value)
        return value if name is None else _Rebuilt(import_class, name)
