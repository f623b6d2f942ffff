"""Copies of graph modules that lose nothing: `copy.deepcopy` drops hooks, plain attributes and input checks.

A copy shares no mutable state with what it was copied from. Shared are only what cannot change or belongs to others:
hook functions, the values in `meta` of nodes and of the module, compiled code, and attributes that refuse to be copied.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen, _PyTreeInfo
from torch.fx.graph_module import _WrappedCall
from torch.fx.node import map_aggregate
from torch.utils._pytree import TreeSpec

from fxopt_core.checks import check_graph_module
from fxopt_core.errors import FxoptError
from fxopt_core.garbage import collector_paused
from fxopt_core.graph import iter_nodes
from fxopt_core.graph_building import add_node, set_order
from fxopt_core.snapshot_graph import own_classes
from fxopt_core.tensor_copying import TensorCopier

_GraphModuleT = TypeVar("_GraphModuleT", bound=GraphModule)

_ATOMIC = frozenset({bool, int, float, complex, str, bytes, type(None), type, FunctionType, BuiltinFunctionType})
_SHARED = frozenset({"shape_env", "_tracer_cls", "_in_spec", "_out_spec"})
_SHALLOW = frozenset({"meta", "range_constraints", "_tracer_extras", "_lineno_map"})
_LEFT_OUT = frozenset({"_compiled_call_impl"})  # what torch.compile made of the original
_CLASS_FIELDS_LEFT_OUT = frozenset({"__dict__", "__weakref__", "__module__", "__doc__", "_wrapped_call"})


def faithful_copy(graph_module: _GraphModuleT) -> _GraphModuleT:
    """Copy a graph module with everything that belongs to it.

    Kept beyond what `copy.deepcopy` keeps: hooks of all kinds on all modules, plain attributes, non-persistent flags,
    the input checks of exported graphs, node names and the order of users, unused submodules, gradients, attributes
    of parameters, memory that tensors share, and the compiled code as it is.

    Hooks stay the same callables; one that is bound to a module of the tree is bound to that module's copy.

    Raises:
        FxoptError: a tensor or module in it cannot be copied; the message says which.

    >>> linear = torch.fx.symbolic_trace(nn.Linear(2, 2))
    >>> linear.note = "kept"
    >>> twin = faithful_copy(linear)
    >>> twin.note, twin.weight is linear.weight, twin.code == linear.code
    ('kept', False, True)
    """
    check_graph_module(graph_module, "faithful_copy")
    with collector_paused(), torch.no_grad():
        twin: _GraphModuleT = _Copier(graph_module).twin
    for hook in getattr(twin, "_deepcopy_hooks", ()):
        hook(twin)
    return twin


class _Layer(dict[int, Any]):
    """A memo on top of another one, so that a copy that fails half-way leaves nothing behind in the one below."""

    def __init__(self, below: dict[int, Any]) -> None:
        super().__init__()
        self._below = below

    def get(self, key: int, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self._below

    def __missing__(self, key: int) -> Any:
        return self._below[key]


class _Copier:
    """One run of copying. `_memo` maps the id of each original to its copy, as `copy.deepcopy` has it."""

    def __init__(self, root: GraphModule) -> None:
        self._memo: dict[int, Any] = {}
        self._kept_alive: list[object] = []  # so that no id in the memo is given out twice
        self._tensors = TensorCopier(self._memo, self._value)
        modules = list(root.modules())
        self._in_tree = {id(module) for module in modules}
        for hook in (hook for module in modules for hook in _hooks(module) if not self._is_bound(hook)):
            self._memo[id(hook)] = hook
        ordinary = [module for module in modules if _is_ordinary(module)]
        self._memo.update((id(module), _blank(module)) for module in ordinary)
        self._tensors.copy_tree(root.named_modules())
        for module in ordinary:
            self._fill(module, self._memo[id(module)])
        self.twin = self._memo[id(root)]

    def _fill(self, module: nn.Module, twin: Any) -> None:
        if isinstance(module, GraphModule):
            self._fill_graph_module(module, twin)
            return
        state = module.__getstate__()  # type: ignore[no-untyped-call]  # torch has no type for it
        self._kept_alive.append(state)
        twin.__setstate__({key: self._value(value) for key, value in state.items()})

    def _fill_graph_module(self, module: GraphModule, twin: GraphModule) -> None:
        _copy_class(module, twin)
        if id(module.graph) not in self._memo:
            self._memo[id(module.graph)] = self._graph(module.graph)
        for key, value in module.__dict__.items():
            if key not in _LEFT_OUT:
                twin.__dict__[key] = self._attribute(key, value)
        twin.graph.owning_module = self._memo.get(id(module.graph.owning_module), twin)

    def _attribute(self, key: str, value: Any) -> Any:
        if key in _SHARED:
            return value
        return copy.copy(value) if key in _SHALLOW else self._value(value)

    def _value(self, value: Any) -> Any:
        """Copy anything: known objects by the memo, containers item by item, others by their own means."""
        if type(value) in _ATOMIC or isinstance(value, TreeSpec):
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, Tensor):
            return self._tensors.copy(value)
        if type(value) in (dict, OrderedDict):
            mapping = self._memo[id(value)] = type(value)()
            mapping.update((self._memo.get(id(key), key), self._value(item)) for key, item in list(value.items()))
            return mapping
        if type(value) is list:
            items = self._memo[id(value)] = []
            items.extend(map(self._value, value))
            return items
        if type(value) in (tuple, set):
            return self._memo.setdefault(id(value), type(value)(map(self._value, value)))
        return self._by_its_own_means(value)

    def _by_its_own_means(self, value: Any) -> Any:
        layer = _Layer(self._memo)
        try:
            twin = copy.deepcopy(value, layer)
        except Exception as error:
            if isinstance(value, nn.Module):
                raise FxoptError(f"module {type(value).__name__} cannot be copied: {error}") from error
            self._memo[id(value)] = value  # a lock, a file, a process group: shared
            return value
        self._memo.update(layer)
        return twin

    def _is_bound(self, hook: Any) -> bool:
        """Whether a hook refers to a module of the tree, so that its copy has to refer to that module's copy."""
        if isinstance(hook, MethodType):
            return id(hook.__self__) in self._in_tree
        if isinstance(hook, functools.partial):
            parts: Iterable[Any] = (hook.func, *hook.args, *hook.keywords.values())
            return any(id(part) in self._in_tree or self._is_bound(part) for part in parts)
        if hasattr(hook, "with_module"):  # torch's wrapper around a hook, which may refer to its module weakly
            return True
        return any(id(part) in self._in_tree for part in getattr(hook, "__dict__", {}).values())

    def _graph(self, graph: Graph) -> Graph:
        twin = self._memo[id(graph)] = Graph(tracer_cls=graph._tracer_cls)
        nodes = {graph._root: twin._root}
        for node in iter_nodes(graph):
            nodes[node] = add_node(twin, node.op, self._target(node.target), node.name, node.type)
        self._memo.update((id(node), new) for node, new in nodes.items())
        for node, new in nodes.items():
            new._update_args_kwargs(self._argument(node._args), self._argument(node._kwargs))
            object.__setattr__(new, "meta", copy.copy(node.meta))
            if vars(node):
                vars(new).update({key: self._value(value) for key, value in vars(node).items()})
        for key, value in vars(graph).items():
            if key not in vars(twin) or key in ("_used_names", "_co_fields", "_tracer_extras"):
                vars(twin)[key] = self._value(value)
        twin.set_codegen(self._codegen(graph._codegen))
        _copy_order(graph, twin, nodes)
        return twin

    def _codegen(self, codegen: CodeGen) -> CodeGen:
        twin = copy.copy(codegen)
        for key, value in vars(codegen).items():
            is_tree_info = isinstance(value, _PyTreeInfo)
            vars(twin)[key] = value._replace(orig_args=list(value.orig_args)) if is_tree_info else self._value(value)
        return twin

    def _argument(self, argument: Any) -> Any:
        return map_aggregate(
            argument, lambda leaf: self._value(leaf) if isinstance(leaf, Tensor) else self._known(leaf)
        )

    def _target(self, target: Any) -> Any:
        is_bound = isinstance(target, MethodType) and id(target.__self__) in self._in_tree
        return self._value(target) if is_bound else self._known(target)

    def _known(self, value: Any) -> Any:
        return self._memo.get(id(value), value)


def _hooks(module: nn.Module) -> Iterator[Any]:
    for key, value in module.__dict__.items():
        if key.endswith("_hooks") and isinstance(value, (dict, list)):
            for hook in value.values() if isinstance(value, dict) else value:
                yield hook
                if hasattr(hook, "with_module"):
                    yield hook.hook


def _is_ordinary(module: nn.Module) -> bool:
    """Whether a module is copied by its attributes; what defines another way is copied that way."""
    cls: Any = type(module)
    own_way = hasattr(cls, "__deepcopy__") or cls.__reduce_ex__ is not object.__reduce_ex__
    return isinstance(module, GraphModule) or not (own_way or cls.__reduce__ is not object.__reduce__)


def _blank(module: nn.Module) -> nn.Module:
    cls = type(module)
    return cls.__new__(cls)


def _copy_class(module: GraphModule, twin: GraphModule) -> None:
    """Give the copy's own class what the original's has: name, compiled `forward`, how it pickles."""
    cls = type(twin)
    cls.__name__ = type(module).__name__
    for own in reversed(own_classes(module)):
        for name, value in vars(own).items():
            if name not in _CLASS_FIELDS_LEFT_OUT:
                setattr(cls, name, value)
    wrapped = getattr(module, "_wrapped_call", None)
    if isinstance(wrapped, _WrappedCall):
        kept = isinstance(
            twin, wrapped.cls
        )  # torch derives the class of a copy from a swapped class, else from its base
        vars_of_call = wrapped if kept else _WrappedCall(cls, wrapped.cls_call)
        setattr(cls, "_wrapped_call", vars_of_call)  # noqa: B010  # torch adds it late too, unknown to type checkers


def _copy_order(graph: Graph, twin: Graph, nodes: dict[Node, Node]) -> None:
    """Copy what depends on the history of a graph: sort keys, orders, names that are taken, the insert point."""
    for node, new in nodes.items():
        object.__setattr__(new, "_sort_key", node._sort_key)
        object.__setattr__(new, "_repr_fn", node._repr_fn)
        set_order(new.users, (nodes[user] for user in node.users if user in nodes))
        set_order(new._input_nodes, (nodes[value] for value in node._input_nodes if value in nodes))
    names, taken = graph._graph_namespace, twin._graph_namespace
    taken._used_names.update(names._used_names)
    taken._base_count.update(names._base_count)
    taken._obj_to_name = {nodes[obj]: name for obj, name in names._obj_to_name.items() if obj in nodes}
    lookup, table = graph._find_nodes_lookup_table.table, twin._find_nodes_lookup_table.table
    table.clear()
    table.update((key, {nodes[node]: None for node in found if node in nodes}) for key, found in lookup.items())
    insert = graph._insert
    if isinstance(insert, MethodType) and insert.__self__ in nodes:
        twin._insert = MethodType(insert.__func__, nodes[insert.__self__])
