"""Copies of graph modules that lose nothing: `copy.deepcopy` drops hooks, plain attributes and input checks.

A copy shares no mutable state with the original. It shares only what cannot change or belongs to others: hook
functions, the values in `meta` of nodes and of the module, compiled code, and attributes that refuse to be copied.
"""

from __future__ import annotations

import copy
import functools
from collections import ChainMap, OrderedDict
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule
from torch.utils._pytree import TreeSpec

from fxopt_core._torch import OWN_GRAPH_FIELDS, WrappedCall, codegen_of
from fxopt_core.errors import FxoptError
from fxopt_core.graph import check_graph_module, iter_nodes
from fxopt_core.state.containers import ATOMS, Containers
from fxopt_core.state.gc_pause import collector_paused
from fxopt_core.state.graph import GraphRows, own_classes

_GraphModuleT = TypeVar("_GraphModuleT", bound=GraphModule)

_SHALLOW = frozenset({"meta", "range_constraints", "_tracer_extras", "_lineno_map"})
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
    with collector_paused(), torch.inference_mode(False), torch.no_grad():
        twin: _GraphModuleT = _Copier(graph_module).twin
    for hook in getattr(twin, "_deepcopy_hooks", ()):
        hook(twin)
    return twin


class _Copier:
    """One run of copying. `_memo` maps the id of each original to its copy, as `copy.deepcopy` has it."""

    def __init__(self, root: GraphModule) -> None:
        self._memo: dict[int, Any] = {id(None): None}
        self._root, modules = root, list(root.modules())
        self._in_tree = {id(module) for module in modules}
        held = [value for each in modules for key, value in vars(each).items() if key.endswith("_hooks") and value]
        hooks = Containers().add(held)  # but for functions, which deepcopy shares
        hooks += [hook.hook for hook in hooks if hasattr(hook, "with_module")]
        self._memo.update((id(hook), hook) for hook in hooks if not self._is_bound(hook))
        ordinary = [module for module in modules if _is_ordinary(module)]
        self._memo.update((id(module), type(module).__new__(type(module))) for module in ordinary)
        for tensor in (*root.parameters(), *root.buffers()):  # before objects that deepcopy references to them
            self._memo[id(tensor)] = self._part(tensor)
        for graph in [module.graph for module in ordinary if isinstance(module, GraphModule)]:
            if id(graph) not in self._memo:
                self._copy_graph(graph)
        for module in ordinary:
            self._fill(module, self._memo[id(module)])
        self.twin = self._memo[id(root)]

    def _copy_graph(self, graph: Graph) -> None:
        twin = self._memo[id(graph)] = Graph()
        for node, new in GraphRows(graph).fill(twin, self._shared).items():
            self._memo[id(node)] = new
            new.meta.update(node.meta)
        for node in filter(vars, iter_nodes(graph)):
            vars(self._memo[id(node)]).update(self._value(vars(node)))
        own = {key: value for key, value in vars(graph).items() if key not in vars(twin) or key in OWN_GRAPH_FIELDS}
        vars(twin).update(self._value(own))
        twin.set_codegen(copy.copy(codegen_of(graph)))
        vars(codegen_of(twin)).update(self._value(vars(codegen_of(graph))))

    def _shared(self, value: Any) -> Any:
        """Return what stands for a target or an argument: copies of tensors and of the tree's methods, else itself."""
        is_bound = isinstance(value, MethodType) and id(value.__self__) in self._in_tree
        return self._value(value) if is_bound or isinstance(value, Tensor) else self._memo.get(id(value), value)

    def _fill(self, module: nn.Module, twin: Any) -> None:
        if not isinstance(module, GraphModule):
            state = module.__getstate__()  # type: ignore[no-untyped-call]  # torch has no type for it
            twin.__setstate__({key: self._value(value) for key, value in state.items()})
            return
        _copy_class(module, twin)
        for key, value in vars(module).items():
            if key in _SHALLOW:
                vars(twin)[key] = copy.copy(value)
            elif key != "_compiled_call_impl":  # what torch.compile made of the original
                vars(twin)[key] = value if key == "shape_env" else self._value(value)
        twin.graph.owning_module = self._memo.get(id(module.graph.owning_module), twin)

    def _value(self, value: Any) -> Any:
        """Copy an attribute; what refuses to be copied is shared, and containers around it are not."""
        if type(value) in ATOMS or isinstance(value, TreeSpec):
            return value
        if type(value) in (dict, OrderedDict) and all(id(item) in self._memo for item in value.values()):
            known = ((self._memo.get(id(key), key), self._memo[id(item)]) for key, item in value.items())
            return self._memo.setdefault(id(value), type(value)(known))
        for part in Containers().add((value,)):
            if id(part) not in self._memo:
                self._memo[id(part)] = self._part(part)
        return copy.deepcopy(value, self._memo)

    def _part(self, part: Any) -> Any:
        """Copy what is no container: a tensor, or any object by its own means."""
        if isinstance(part, Tensor):
            return self._tensor(part)
        layer = ChainMap({}, self._memo)  # a copy that fails half-way leaves nothing behind in the memo
        try:
            twin = part if isinstance(part, TreeSpec) else copy.deepcopy(part, layer)  # type: ignore[arg-type]  # any mutable mapping does
        except Exception as error:
            if isinstance(part, nn.Module):
                raise FxoptError(f"module {type(part).__name__} cannot be copied: {error}") from error
            return part  # a lock, a file, a process group: shared
        self._memo.update(layer.maps[0])
        return twin

    def _tensor(self, tensor: Tensor) -> Tensor:
        """Copy a tensor; unlike with `copy.deepcopy`, copies of parameters that share memory share memory, too."""
        if not tensor.is_leaf:
            held = (*self._root.named_parameters(), *self._root.named_buffers())
            name = next((name for name, each in held if each is tensor), "a tensor")
            found = f"{name} is the result of a computation that autograd recorded"
            raise FxoptError(f"{found}, from which a copy would be cut off; detach it, or compute it in the graph")
        if type(tensor) not in (Tensor, nn.Parameter) and not isinstance(tensor, FakeTensor):
            own: Tensor = copy.deepcopy(tensor, self._memo)
            return own
        # A deep copy of a fake one would look for its memory.
        data = tensor.data.clone() if isinstance(tensor, FakeTensor) else copy.deepcopy(tensor.data, self._memo)
        is_parameter, flag = isinstance(tensor, nn.Parameter), tensor.requires_grad
        twin: Tensor = nn.Parameter(data, flag) if is_parameter else data.requires_grad_(flag)
        self._memo[id(tensor)] = twin
        vars(twin).update(self._value(vars(tensor)))
        twin.grad = self._value(tensor.grad)
        return twin

    def _is_bound(self, hook: Any) -> bool:
        """Return whether a hook refers to a module of the tree, so that its copy has to refer to the module's copy."""
        parts = [*getattr(hook, "__dict__", {}).values()]
        if isinstance(hook, functools.partial):
            parts += (hook.func, *hook.args, *hook.keywords.values())
        owners = [getattr(part, "__self__", None) for part in (hook, *parts)]
        if any(isinstance(part, functools.partial) and self._is_bound(part) for part in parts):
            return True
        # torch's wrapper around a hook may refer to its module weakly.
        return hasattr(hook, "with_module") or any(id(part) in self._in_tree for part in (*parts, *owners))


def _is_ordinary(module: nn.Module) -> bool:
    """Return whether a module is copied attribute by attribute, because its class defines no other way."""
    cls: Any = type(module)
    own_way = hasattr(cls, "__deepcopy__") or cls.__reduce_ex__ is not object.__reduce_ex__
    return isinstance(module, GraphModule) or not (own_way or cls.__reduce__ is not object.__reduce__)


def _copy_class(module: GraphModule, twin: GraphModule) -> None:
    """Give the copy's own class the name, compiled `forward` and pickling of the original's."""
    cls = type(twin)
    cls.__name__ = type(module).__name__
    for own in reversed(own_classes(module)):
        for name, value in vars(own).items():
            if name not in _CLASS_FIELDS_LEFT_OUT:
                setattr(cls, name, value)
    wrapped = getattr(module, "_wrapped_call", None)
    if isinstance(wrapped, WrappedCall):
        # torch derives the class of a copy from a swapped class, else from its base.
        call = wrapped if isinstance(twin, wrapped.cls) else WrappedCall(cls, wrapped.cls_call)
        setattr(cls, "_wrapped_call", call)  # noqa: B010  # torch adds it late too, unknown to type checkers
