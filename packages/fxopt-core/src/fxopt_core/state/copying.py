"""Copies of graph modules that lose nothing: `copy.deepcopy` drops hooks, plain attributes and input checks.

A copy shares no mutable state with the original. It shares only what cannot change or belongs to others: hook
functions, the values in `meta` of nodes and of the module, and compiled code.
"""

from __future__ import annotations

import copy
import functools
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule
from torch.utils._pytree import TreeSpec

from fxopt_core._torch import OWN_GRAPH_FIELDS, codegen_of
from fxopt_core.errors import FxoptError
from fxopt_core.graph import check_graph_module
from fxopt_core.state.containers import Containers
from fxopt_core.state.gc_pause import collector_paused
from fxopt_core.state.graph import GraphRows, own_classes

_GraphModuleT = TypeVar("_GraphModuleT", bound=GraphModule)

_SHALLOW = frozenset({"meta", "range_constraints", "_tracer_extras", "_lineno_map"})
# Without `__call__` and `_wrapped_call`, calls are those of `nn.Module` until torch recompiles the copy.
_CLASS_FIELDS_LEFT_OUT = frozenset({"__dict__", "__weakref__", "__module__", "__doc__", "__call__", "_wrapped_call"})


def faithful_copy(graph_module: _GraphModuleT) -> _GraphModuleT:
    """Copy a graph module with everything that belongs to it.

    Kept beyond what `copy.deepcopy` keeps: hooks of all kinds on modules and tensors, plain attributes, non-persistent
    flags, the input checks of exported graphs, node names and the order of users, unused submodules, gradients,
    attributes of parameters, memory that tensors share, and the compiled code as it is.

    Hooks stay the same callables; a module's hook that is bound to a module of the tree is bound to that module's copy.

    Raises:
        FxoptError: a tensor, a module or an attribute cannot be copied; the message says which.

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
        self._memo: dict[int, Any] = {}
        modules = dict(root.named_modules())
        self._in_tree = set(map(id, modules.values()))
        states = [vars(module) for module in modules.values()]
        hooks = Containers().add(value for state in states for key, value in state.items() if key.endswith("_hooks"))
        hooks += [hook.hook for hook in hooks if hasattr(hook, "with_module")]
        # An object that the memo maps to itself is not copied.
        self._memo.update((id(hook), hook) for hook in hooks if not self._is_bound(hook))
        graph_modules = [module for module in modules.values() if isinstance(module, GraphModule)]
        self._memo.update((id(module), type(module).__new__(type(module))) for module in graph_modules)
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):  # before what refers to them
            self._memo[id(tensor)] = self._tensor(tensor, name)
        for graph in [module.graph for module in graph_modules]:
            if id(graph) not in self._memo:
                self._copy_graph(graph)
        for name, module in reversed(modules.items()):  # children first, so that an error names the one that is meant
            self._value(module, f"module {name!r}")
        for module in graph_modules:
            self._fill(module, self._memo[id(module)])
        self.twin = self._memo[id(root)]

    def _copy_graph(self, graph: Graph) -> None:
        twin = self._memo[id(graph)] = Graph()
        for node, new in GraphRows(graph).fill(twin, self._shared).items():
            self._memo[id(node)] = new
            new.meta.update(node.meta)
        own = {key: value for key, value in vars(graph).items() if key not in vars(twin) or key in OWN_GRAPH_FIELDS}
        vars(twin).update(self._value(own, "an attribute of the graph"))
        twin.set_codegen(copy.copy(codegen_of(graph)))
        vars(codegen_of(twin)).update(self._value(vars(codegen_of(graph)), "the code generator"))

    def _shared(self, value: Any) -> Any:
        """Return what stands for a target or an argument: copies of tensors and of the tree's methods, else itself."""
        if isinstance(value, Tensor) or (isinstance(value, MethodType) and id(value.__self__) in self._in_tree):
            return self._value(value, f"{value!r} in the graph")
        return self._memo.get(id(value), value)

    def _fill(self, module: GraphModule, twin: GraphModule) -> None:
        # The class that torch makes for each graph module has its name, compiled `forward` and pickling.
        type(twin).__name__ = type(module).__name__
        for own in reversed(own_classes(module)):
            for key, value in vars(own).items():
                # The call of a swapped class, from which torch derives the copy's own, works for both.
                if key not in _CLASS_FIELDS_LEFT_OUT or isinstance(twin, getattr(value, "cls", ())):
                    setattr(type(twin), key, value)
        for key, value in vars(module).items():
            if key in _SHALLOW:
                vars(twin)[key] = copy.copy(value)
            elif key != "_compiled_call_impl":  # what torch.compile made of the original
                vars(twin)[key] = value if key == "shape_env" else self._value(value, f"attribute {key!r}")
        twin.graph.owning_module = self._memo.get(id(module.graph.owning_module), twin)

    def _value(self, value: Any, what: str) -> Any:
        """Copy an attribute, or raise an `FxoptError` that says what refuses to be copied."""
        for part in Containers().add((value,)):
            if isinstance(part, TreeSpec):  # immutable, and torch warns of copying it
                self._memo[id(part)] = part
            elif isinstance(part, Tensor) and id(part) not in self._memo:
                self._memo[id(part)] = self._tensor(part, what)
        try:
            return copy.deepcopy(value, self._memo)
        except Exception as error:  # such as a lock, a file, a process group, whatever holds it
            raise FxoptError(f"{what} cannot be copied: {error}") from error

    def _tensor(self, tensor: Tensor, name: str) -> Tensor:
        """Copy a tensor; unlike with `copy.deepcopy`, copies of parameters that share memory share memory, too."""
        if not tensor.is_leaf:
            raise FxoptError(f"{name} was computed while autograd recorded: detach it, or compute it in the graph")
        # Subclasses, lazy parameters among them, define their own deep copy.
        if type(tensor) not in (Tensor, nn.Parameter) and not isinstance(tensor, FakeTensor):
            return copy.deepcopy(tensor, self._memo)
        # A deep copy of a fake one would look for its memory.
        data = tensor.data.clone() if isinstance(tensor, FakeTensor) else copy.deepcopy(tensor.data, self._memo)
        is_parameter, flag = isinstance(tensor, nn.Parameter), tensor.requires_grad
        twin: Tensor = nn.Parameter(data, flag) if is_parameter else data.requires_grad_(flag)
        # Noted before its attributes are copied, since they may refer to the tensor.
        self._memo[id(tensor)] = twin
        vars(twin).update(self._value(vars(tensor), f"an attribute of {name}"))
        twin.grad = self._value(tensor.grad, f"the gradient of {name}")
        for key in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            setattr(twin, key, copy.copy(getattr(tensor, key)))
        return twin

    def _is_bound(self, hook: Any) -> bool:
        """Return whether a hook refers to a module of the tree, so that its copy has to refer to the module's copy."""
        inside = getattr(hook, "__dict__", {}).values()
        if isinstance(hook, functools.partial):
            inside = (hook.func, *hook.args, *hook.keywords.values())
        owners = [getattr(part, "__self__", part) for part in (hook, *inside)]
        # torch's wrapper around a hook may refer to its module weakly.
        return hasattr(hook, "with_module") or any(id(owner) in self._in_tree for owner in owners)
