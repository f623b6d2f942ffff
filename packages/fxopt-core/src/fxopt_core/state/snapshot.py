"""Exact rollback of a graph module, or of any module: structure always, contents of tensors on request.

A snapshot records references and shallow copies, never a deep copy, in time linear in nodes, modules and tensors. It
brings back the same graph, the modules with their classes, hooks, flags and attributes, and each tensor in its place
with its memory and dtype. If nodes have changed, the graph gets new ones that look the same. Restoring calls no hook
and compiles nothing.

In `meta` and in plain attributes, the contents of built-in containers come back at any depth. Of other objects, only
the reference does: what a pass changes inside an object of another class stays changed.

Records refer to child modules and tensors through their records, never directly. From the first release of a tensor on,
modules are held weakly, so that what a pass drops is really freed. An object that is still alive on restoring, because
a caller's model shares it, returns itself; otherwise a new one is built from the record.

`p.data = other`, `.double()`, `requires_grad_()` and similar calls change a tensor without touching the dictionaries
of its module. They are undone from an alias, a second tensor over the same memory. Writes into that memory are noticed
by the version counter, except `p.data.mul_(2)` and writes into inference tensors; undoing writes takes a copy
(`protect_values`).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy

from fxopt_core.changes import changed
from fxopt_core.errors import FxoptError
from fxopt_core.state.containers import ATOMS, Containers, put_back
from fxopt_core.state.gc_pause import collector_paused
from fxopt_core.state.graph import ClassState, GraphState, own_classes

Rebuild: TypeAlias = Callable[[], Tensor]
_PLAIN = (Tensor, nn.Parameter)
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})
_MOSTLY_EMPTY = frozenset({dict, OrderedDict, list, set})


class _TensorState:
    """The state of one tensor. `registered`: it is a parameter, a buffer or part of a tensor, not a plain attribute."""

    registered = protected = False
    rebuild: Rebuild | None = None
    reference: weakref.ref[Tensor] | None = None
    memory: weakref.ref[torch.UntypedStorage] | None = None
    place: tuple[Any, ...] = ()  # of a released tensor; of others, the alias has it

    def __init__(self, tensor: Tensor, name: str) -> None:
        self.name = name  # the first one, if it has several
        self.cls = type(tensor)
        self.tensor: Tensor | None = tensor
        alias: Tensor = tensor.data
        self.alias: Tensor | None = alias
        self.nbytes = _nbytes(alias)
        self.version = None if tensor.is_inference() else tensor._version
        self.requires_grad, self.leaf = tensor.requires_grad, tensor.is_leaf
        self.attributes = dict(vars(tensor))
        hooks = tensor._backward_hooks
        self.hooks = hooks, None if hooks is None else dict(hooks)
        self.grad = tensor.grad if self.leaf else None

    def restore_contents(self) -> bool:
        """Restore object and memory; return whether the contents are unchanged."""
        tensor = self.tensor if self.tensor is not None or self.reference is None else self.reference()
        if tensor is None:
            data = self._rebuilt()
            self.tensor = nn.Parameter(data, self.requires_grad) if issubclass(self.cls, nn.Parameter) else data
            self.version = None
            return True
        self.tensor = tensor
        unwritten = self.protected or self.version is None or tensor.is_inference() or tensor._version == self.version
        place = self.place if self.alias is None else _place(self.alias)
        if _place(tensor.data) != place:  # for example, a pass let it share the memory of a new tensor
            tensor.data = self._rebuilt() if self.alias is None else self.alias
        if self.alias is not None and _nbytes(self.alias) != self.nbytes:
            unwritten = self.protected
            self.alias.untyped_storage().resize_(self.nbytes or 0)
        return unwritten

    def restore_flags(self) -> bool:
        """Restore class, attributes, hooks, flags and gradient; return whether that was possible."""
        tensor, (hooks, held) = self.tensor, self.hooks
        assert tensor is not None
        if type(tensor) is not self.cls:
            tensor.__class__ = self.cls
        put_back(vars(tensor), self.attributes)
        if tensor._backward_hooks is not hooks:
            tensor._backward_hooks = hooks
        if hooks is not None:
            put_back(hooks, held)
        if not self.leaf:
            return True
        if not tensor.is_leaf:
            if tensor._is_view():
                return False  # torch refuses to detach a view in place
            tensor.detach_()
        if tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        if tensor.grad is not self.grad:
            tensor.grad = self.grad
        return True

    def _rebuilt(self) -> Tensor:
        """Return the memory of a released tensor if anyone still holds it, else its contents in memory of their own."""
        assert self.rebuild is not None
        shape, dtype, device, *_ = self.place
        storage = None if self.memory is None else self.memory()
        # What is made inside inference mode could not be trained or written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            if storage is not None and storage.nbytes() == self.nbytes:
                # `release` takes only contiguous tensors that fill their storage, so a shape says everything.
                return torch.empty(0, dtype=dtype, device=device).set_(storage).view(shape)
            data = self.rebuild().detach()
        if _place(data)[:3] != self.place[:3]:
            wanted = f"what stands in for it is {_place(data)[:3]}, expected {self.place[:3]}"
            raise FxoptError(f"tensor {self.name!r} was released, and {wanted}")
        return data


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the memory of a tensor; sparse and wrapper tensors have none of their own."""
    return tensor.untyped_storage() if type(tensor) in _PLAIN and tensor.layout is torch.strided else None


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return form and memory of a tensor, without keeping the memory alive; equal if neither was replaced."""
    form = torch.Size() if is_lazy(tensor) else tensor.shape, tensor.dtype, tensor.device
    storage = _storage(tensor)
    if storage is not None:
        return *form, storage._cdata, tensor.storage_offset(), tensor.stride()
    # A wrapper keeps its memory in inner tensors, which are recorded on their own. A sparse one equals none: it keeps
    # its memory in inner tensors without a name.
    return form if tensor.layout is torch.strided else (*form, object())


def _nbytes(tensor: Tensor) -> int | None:
    return None if (storage := _storage(tensor)) is None else storage.nbytes()


class _ModuleState:
    """One module: its class, its attributes, and what is registered with it."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module: nn.Module | None = module
        self.reference = weakref.ref(module)
        self.name, self.cls = name, type(module)
        self.attributes = dict(vars(module))
        self.registered: dict[str, dict[str, Any]] = {}

    def to_weak(self) -> None:
        """Hold the module only weakly, and drop the dictionaries that hold its tensors and children."""
        if self.module is not None:
            self.module = None
            self.attributes.update((key, type(self.attributes[key])) for key in self.registered)

    def revive(self) -> nn.Module:
        """Return the module, or a new one of its class if it is gone; `restore` sets its attributes."""
        if self.module is None:
            alive = self.reference()
            # Without the constructor, which may require arguments and would initialise weights.
            self.module = object.__new__(self.cls) if alive is None else alive
        return self.module

    def restore(self) -> None:
        """Restore class, attributes and registered members, after all modules of the tree were revived."""
        module = self.revive()
        now, attributes = dict(vars(module)), {key: _object_of(value) for key, value in self.attributes.items()}
        for value in attributes.values():
            if type(value) in _MOSTLY_EMPTY:
                put_back(value, ())  # what it held, if anything, comes back with the other containers
        for key, held in self.registered.items():
            cls = attributes[key]
            if isinstance(cls, type):  # it could not be held: the present one, or a new one, takes over
                attributes[key] = now[key] if type(now.get(key)) is cls else cls()
            put_back(attributes[key], {name: _object_of(item) for name, item in held.items()})
        put_back(vars(module), attributes)
        if type(module) is not self.cls:
            module.__class__ = self.cls


def _object_of(value: Any) -> Any:
    if isinstance(value, _TensorState):
        return value.tensor
    return value.module if isinstance(value, _ModuleState) else value


@contextmanager
def _raw_tensors() -> Iterator[None]:
    """Read and write tensors as they are: nothing enters autograd, and no subclass intervenes."""
    with collector_paused(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        yield


class Snapshot:
    """The state of a module at one moment; `restore` goes back to it, any number of times.

    It covers all submodules, and the graphs of nested graph modules. ``protect_values`` also copies the contents of all
    tensors, or of the given ones, so that `restore` undoes writes in place; the copies take as much memory as the
    tensors.

    >>> from fxopt_core import iter_nodes
    >>> import operator
    >>> graph_module = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    >>> snapshot = Snapshot(graph_module)
    >>> graph_module.graph.erase_node(graph_module.graph.output_node())
    >>> del graph_module.weight
    >>> snapshot.restore()
    ()
    >>> graph_module.graph.lint()
    >>> [node.name for node in iter_nodes(graph_module.graph)], tuple(graph_module.weight.shape)
    (['input_1', 'weight', 'bias', 'linear', 'output'], (2, 2))
    """

    def __init__(self, module: nn.Module, *, protect_values: bool | Iterable[Tensor] = False) -> None:
        self._modules: dict[int, _ModuleState] = {}  # by id, the root first
        self._tensors: dict[int, _TensorState] = {}
        self._containers = Containers()
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}  # memory of protected tensors, and a copy of it
        self._is_weak = False
        with _raw_tensors():
            self._module(module, "")
            found = [state.module for state in self._modules.values() if isinstance(state.module, GraphModule)]
            graphs = {id(each.graph): each.graph for each in found}
            # `Containers` come last: they fill the dictionaries and lists again that restoring a module has emptied.
            self._graphs: list[ClassState | GraphState | Containers] = [
                *(ClassState(cls) for each in found for cls in own_classes(each)),
                *(GraphState(graph, self._containers) for graph in graphs.values()),
                self._containers,
            ]
        chosen = self._tensors if protect_values is True else map(id, protect_values or ())
        self._protect(self._tensors[key] for key in chosen)

    def _module(self, module: nn.Module, name: str) -> _ModuleState:
        """Record a module and everything below it, once, however many names it has."""
        state = self._modules.get(id(module))
        if state is None:
            state, prefix = _ModuleState(module, name), f"{name}." if name else ""
            self._modules[id(module)] = state
            for key, value in vars(module).items():
                if type(value) in ATOMS or (type(value) in _MOSTLY_EMPTY and not value):
                    continue  # settings, and hooks, which need no record to be emptied again
                if key in _REGISTERED and isinstance(value, dict):  # script modules have none here
                    held = state.registered[key] = dict(value)
                    for each, item in value.items():
                        if isinstance(item, Tensor):
                            held[each] = self._tensor(item, prefix + each, registered=True)
                        elif item is not None:
                            held[each] = self._module(item, prefix + each)
                elif isinstance(value, Tensor):
                    state.attributes[key] = self._tensor(value, prefix + key)
                else:
                    for part in self._containers.add((value,)):
                        if isinstance(part, Tensor):
                            self._tensor(part, f"{prefix}{key}[...]")
        return state

    def _tensor(self, tensor: Tensor, name: str, *, registered: bool = False) -> _TensorState:
        """Record a tensor, the tensors that a subclass keeps in attributes, and its gradient."""
        state = self._tensors.get(id(tensor))
        if state is None:
            state = self._tensors[id(tensor)] = _TensorState(tensor, name)
            for key, value in (("grad", state.grad), *state.attributes.items()):
                if isinstance(value, Tensor):
                    self._tensor(value, f"{name}.{key}", registered=True)
        state.registered |= registered
        return state

    def _protect(self, tensors: Iterable[_TensorState]) -> None:
        """Copy the contents of tensors; those over one storage share its copy."""
        with _raw_tensors():
            for state in tensors:
                memory, storage = state.alias, None if state.alias is None else _storage(state.alias)
                if memory is None or memory.is_meta:
                    continue
                if storage is not None:
                    # The bytes of the whole storage, so that every tensor over it comes back with one copy.
                    memory = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(storage)
                key = id(memory) if storage is None else storage._cdata
                if key not in self._saved:
                    self._saved[key] = memory, memory.clone()
                state.protected = True

    def release(self, tensor: Tensor, rebuild: Rebuild) -> None:
        """Hold one tensor only weakly, so that its memory is freed as soon as the caller drops it as well.

        From then on the snapshot holds submodules only weakly, too. If the tensor is gone on restoring, `rebuild` makes
        the contents again, in the same shape and dtype and on the same device; `requires_grad`, attributes, gradient
        and ties come from the record. A tensor that is still alive comes back itself. A protected tensor stays held.

        A tensor that is newer than the snapshot is left alone, and one whose strides or shared memory would be lost.
        """
        state = self._tensors.get(id(tensor))
        alias = None if state is None or state.tensor is not tensor or state.protected else state.alias
        if state is None or alias is None or not alias.is_contiguous() or state.nbytes not in (None, alias.nbytes):
            return
        for module in () if self._is_weak else list(self._modules.values())[1:]:
            module.to_weak()
        self._is_weak = True
        storage = _storage(alias)
        state.memory, state.place = None if storage is None else weakref.ref(storage), _place(alias)
        state.rebuild, state.reference = rebuild, weakref.ref(tensor)
        state.tensor = state.alias = None

    def restore(self) -> tuple[str, ...]:
        """Restore everything.

        Returns:
            Full names of the tensors whose contents may still differ, because their version counters show writes in
            place (which writes through `.data` and into inference tensors do not). Empty if the snapshot protects
            values, which have then been copied back.

        Raises:
            FxoptError: something could not be restored, such as a released tensor that is gone and was not rebuilt;
                everything else was.
        """
        written: dict[str, None] = {}
        failures: dict[str, Exception] = {}
        tensors, modules = self._tensors.values(), self._modules.values()
        # A gradient must have the form of its tensor, so all contents are restored before any flags.
        steps: list[tuple[str, Callable[[], bool | None]]] = [
            *((each.name, each.restore_contents) for each in tensors),
            ("values of tensors", self._restore_values),
            *((each.name, each.restore_flags) for each in tensors),
            *((each.name or "the graph module", each.restore) for each in modules),
        ]
        try:
            with _raw_tensors():
                for module in modules:
                    module.revive()
                for name, step in steps:
                    try:
                        if step() is False:
                            written[name] = None
                    except Exception as error:  # one failure does not keep the rest from being restored
                        failures.setdefault(name, error)
                for state in self._graphs:
                    state.restore()
        finally:
            changed()  # last: whoever compares layers meanwhile has to compare them again
        if failures:
            first = next(iter(failures.values()))
            raise FxoptError(f"rollback restored everything but {', '.join(failures)}: {first}") from first
        return tuple(written)

    def _restore_values(self) -> None:
        for memory, copy in self._saved.values():
            if _storage(memory) is None or not torch.equal(memory, copy):  # what is mapped read-only stays unwritten
                memory.copy_(copy)


@contextmanager
def kept(module: nn.Module, *, buffers: bool = False) -> Iterator[None]:
    """Restore a module after a ``with`` block that runs or traces it, and the state of torch's CPU random numbers.

    It restores what a `Snapshot` does, and the values of tensors that are neither parameters nor buffers; with
    `buffers`, those of buffers, too.

    >>> linear = nn.Linear(2, 2)
    >>> linear.seen, linear.total = [], torch.zeros(1)
    >>> with kept(linear):
    ...     linear.seen.append(1)
    ...     linear.total += 1
    ...     linear.extra = nn.ReLU()
    >>> linear.seen, linear.total, hasattr(linear, "extra")
    ([], tensor([0.]), False)
    """
    snapshot = Snapshot(module)
    written = {id(each) for each in module.buffers()} if buffers else set()  # a script module's have no record
    snapshot._protect(state for key, state in snapshot._tensors.items() if key in written or not state.registered)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        snapshot.restore()
