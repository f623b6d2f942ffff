"""Exact rollback of a graph module, or of any module: structure always, contents of tensors on request.

A snapshot records references and shallow copies, never a deep copy, in time linear in nodes, modules and tensors. It
brings back the same graph, modules and their classes, hooks, flags, attributes, and which tensor with which memory and
dtype sits where. Where nodes have changed, the graph gets new ones, equal in all that can be seen. It calls no hook and
compiles nothing.

In `meta` and in plain attributes, what built-in containers hold comes back at any depth. Of all other objects, only the
reference does: what a pass changes inside of an object of some class of its own stays.

Records refer to child modules and tensors through their records, never directly. From the first release of a tensor on,
modules are held weakly, so that what a pass drops is really freed. If an object is still alive when restoring (a
caller's model shares it), that very object returns; if nobody but the snapshot knew it, a new one is built from the
record, and nobody is left to tell the difference.

`p.data = other`, `.double()`, `requires_grad_()` and their like change a tensor without touching the dictionaries of
its module. They are undone from an alias, a second tensor over the same memory. Writes into that memory are noticed by
the version counter, which `p.data.mul_(2)` and inference tensors escape; undoing them takes a copy (`protect`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy

from fxopt_core.changes import changed
from fxopt_core.errors import FxoptError
from fxopt_core.gc_pause import collector_paused
from fxopt_core.state.containers import CONTAINERS, MOSTLY_EMPTY, Containers, put_back
from fxopt_core.state.graph import ClassState, GraphState, own_classes

Rebuild: TypeAlias = Callable[[], Tensor]
_PLAIN = (Tensor, nn.Parameter)
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class TensorState:
    """One tensor object as it was. `registered` says that it is no plain attribute, but a parameter, buffer or part."""

    saved: Tensor | None = None
    rebuild: Rebuild | None = None
    reference: weakref.ref[Tensor] | None = None
    registered = False

    def __init__(self, tensor: Tensor, name: str) -> None:
        self.name = name  # the first one, if it has several
        self.cls = type(tensor)
        self.tensor: Tensor | None = tensor
        alias: Tensor = tensor.data
        self.alias: Tensor | None = alias
        self.place, self.nbytes = _place(alias), _nbytes(alias)
        self.version = None if tensor.is_inference() else tensor._version
        self.requires_grad = tensor.requires_grad
        self.leaf = tensor.is_leaf
        self.attributes: Mapping[str, Any] = dict(tensor.__dict__) if tensor.__dict__ else _NOTHING
        hooks = tensor._backward_hooks
        self.hooks = None if hooks is None else (hooks, dict(hooks))
        self.grad = tensor.grad if self.leaf else None

    def protect(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Copy the contents. Tensors over one storage share its copy, which `storages` holds by the storage's id."""
        assert self.alias is not None
        storage = _plain_storage(self.alias)
        if storage is None:
            self.saved = self.alias.clone()
        else:
            if storage._cdata not in storages:
                storages[storage._cdata] = storage.clone()  # type: ignore[no-untyped-call]  # torch's lacks a type
            like = self.alias
            saved = like.new_empty(0).set_(storages[storage._cdata], like.storage_offset(), like.size(), like.stride())
            self.saved = saved

    def release(self, rebuild: Rebuild) -> None:
        """Hold the tensor only weakly; a protected one comes back from its copy."""
        assert self.tensor is not None
        copy = self.saved
        self.rebuild = rebuild if copy is None else lambda: copy
        self.reference = weakref.ref(self.tensor)
        self.tensor = self.alias = None

    def restore_contents(self, done: set[int]) -> bool:
        """Put object and memory back; return whether the contents are what they were.

        `done` collects the storages whose contents were already copied back.
        """
        tensor = self.reference() if self.tensor is None and self.reference is not None else self.tensor
        if tensor is None:
            data = self._data()
            self.version = None
            self.tensor = nn.Parameter(data, self.requires_grad) if issubclass(self.cls, nn.Parameter) else data
            return True
        self.tensor = tensor
        unwritten = self.version is None or tensor.is_inference() or tensor._version == self.version
        if _place(tensor.data) != self.place:  # a pass let it share the memory of what it made, say
            tensor.data = self._data() if self.alias is None else self.alias
            unwritten = unwritten or (self.alias is None and tensor._version == self.version)
        if self.alias is None:
            return unwritten
        if _nbytes(self.alias) != self.nbytes:
            unwritten = False
            self.alias.untyped_storage().resize_(self.nbytes or 0)
        if self.saved is not None:
            _copy_back(self.alias, self.saved, done)
        return unwritten or self.saved is not None

    def restore_flags(self) -> bool:
        """Put class, attributes, hooks, flags and gradient back; return whether that was possible."""
        tensor = self.tensor
        assert tensor is not None
        if type(tensor) is not self.cls:
            tensor.__class__ = self.cls
        put_back(vars(tensor), dict(self.attributes))
        hooks = None if self.hooks is None else self.hooks[0]
        if tensor._backward_hooks is not hooks:
            tensor._backward_hooks = hooks
        if self.hooks is not None:
            put_back(*self.hooks)
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

    def _data(self) -> Tensor:
        """Return the contents of a released tensor, in memory of their own."""
        assert self.rebuild is not None
        data = self.rebuild().detach()
        if _place(data)[:3] != self.place[:3]:
            raise FxoptError(
                f"tensor {self.name!r} was released, and what stands in for it is {_place(data)[:3]} where "
                f"{self.place[:3]} was expected; release a tensor with a function that returns it as it was"
            )
        return data


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Return form and memory of a tensor, without keeping the memory alive; equal where nothing was exchanged."""
    form = torch.Size() if is_lazy(tensor) else tensor.shape, tensor.dtype, tensor.device
    if tensor.layout is not torch.strided:
        return *form, object()  # equal to none: it keeps its memory in inner tensors without a name
    if type(tensor) not in _PLAIN:
        return form  # a wrapper keeps its memory in inner tensors, which are recorded on their own
    return *form, tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.stride()


def _plain_storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory of a plain tensor; sparse, meta and wrapper tensors have none of their own."""
    plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta
    return tensor.untyped_storage() if plain else None


def _nbytes(tensor: Tensor) -> int | None:
    storage = _plain_storage(tensor)
    return None if storage is None else storage.nbytes()


def _copy_back(alias: Tensor, saved: Tensor, done: set[int]) -> None:
    storage = _plain_storage(alias)
    if storage is None:
        alias.copy_(saved)
    elif storage._cdata not in done:
        done.add(storage._cdata)
        raw = torch.empty(0, dtype=torch.uint8, device=alias.device)
        there, here = raw.set_(storage), raw.new_empty(0).set_(saved.untyped_storage())
        if not torch.equal(there, here):  # memory that is mapped read-only must not be written without need
            there.copy_(here)


_LEAVES = frozenset({bool, int, float, str, type(None)})
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})


class ModuleState:
    """One module: its class, its attributes, and what is registered with it."""

    __slots__ = ("attributes", "cls", "module", "name", "namespace", "reference", "registered")

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module: nn.Module | None = module
        self.name = name
        self.cls = type(module)
        self.namespace: dict[str, Any] | None = module.__dict__
        self.attributes: dict[str, Any] = module.__dict__.copy()
        self.registered: dict[str, dict[str, TensorState | ModuleState | None]] = {}
        self.reference: weakref.ref[nn.Module] | None = None

    def loosen(self) -> None:
        """Hold the module only weakly, and none of the dictionaries that hold its tensors and children."""
        if self.module is not None:
            self.reference = weakref.ref(self.module)
            self.module = self.namespace = None
            for key in self.registered:
                self.attributes[key] = type(self.attributes[key])

    def revive(self) -> nn.Module:
        """Return the module, a new one of its class if it is gone; its attributes are set by `restore`."""
        if self.module is None:
            assert self.reference is not None
            alive = self.reference()
            self.module = object.__new__(self.cls) if alive is None else alive
        return self.module

    def restore(self) -> None:
        """Put class, attributes and what is registered back; all records of the tree have been revived."""
        module = self.revive()
        now = dict(module.__dict__)
        attributes = {key: _object_of(value) for key, value in self.attributes.items()}
        for key, value in attributes.items():
            if key in self.registered:
                if isinstance(value, type):  # it could not be held: the present one, or a new one, takes over
                    value = attributes[key] = now[key] if type(now.get(key)) is value else value()
                put_back(value, {name: _object_of(item) for name, item in self.registered[key].items()})
            elif isinstance(value, CONTAINERS):
                put_back(value, [])  # what it held, if anything, comes back with the other containers
        if self.namespace is not None and module.__dict__ is not self.namespace:
            object.__setattr__(module, "__dict__", self.namespace)
        put_back(module.__dict__, attributes)
        if type(module) is not self.cls:
            module.__class__ = self.cls


class Tree:
    """The records of a module tree, made in one walk; every module and tensor has one, under however many names.

    `containers` gets what plain attributes hold.
    """

    def __init__(self, root: nn.Module, containers: Containers) -> None:
        self.modules = {id(root): ModuleState(root, "")}
        self.tensors: dict[int, TensorState] = {}
        self._is_loose = False
        waiting = [(root, self.modules[id(root)])]
        while waiting:
            module, state = waiting.pop()
            prefix, children = f"{state.name}." if state.name else "", []
            for key, value in module.__dict__.items():
                cls = type(value)
                if cls in _LEAVES or (cls in MOSTLY_EMPTY and not value):
                    continue  # most attributes are such, and one that is empty needs no record
                if key in _REGISTERED and isinstance(value, dict):  # those of scripts are no dictionaries
                    state.registered[key] = {}
                    for name, item in value.items():
                        if isinstance(item, Tensor):
                            item = self._tensor(item, prefix + name, registered=True)
                        elif item is not None and id(item) not in self.modules:
                            self.modules[id(item)] = ModuleState(item, prefix + name)
                            children.append((item, self.modules[id(item)]))
                        state.registered[key][name] = item if key != "_modules" else self.modules.get(id(item))
                elif isinstance(value, Tensor):
                    state.attributes[key] = self._tensor(value, prefix + key)
                else:
                    for tensor in containers.add((value,)):
                        self._tensor(tensor, f"{prefix}{key}[...]")
            waiting += reversed(children)

    def release(self, tensor: Tensor) -> TensorState | None:
        """Return the record of a tensor that is to be held weakly, as all modules but the root are from now on."""
        state = self.tensors.get(id(tensor))
        if state is None or state.tensor is not tensor:
            return None
        if not self._is_loose:
            self._is_loose = True
            for module in list(self.modules.values())[1:]:
                module.loosen()
        return state

    def _tensor(self, tensor: Tensor, name: str, *, registered: bool = False) -> TensorState:
        """Record a tensor, the tensors that a subclass keeps in attributes, and its gradient."""
        state = self.tensors.get(id(tensor))
        if state is None:
            state = self.tensors[id(tensor)] = TensorState(tensor, name)
            parts = {**state.attributes, "grad": state.grad} if state.grad is not None else state.attributes
            for key, value in parts.items():
                if isinstance(value, Tensor):
                    self._tensor(value, f"{name}.{key}", registered=True)
        state.registered |= registered
        return state


def _object_of(value: Any) -> Any:
    if isinstance(value, TensorState):
        return value.tensor
    return value.module if isinstance(value, ModuleState) else value


@contextmanager
def _raw_tensors() -> Iterator[None]:
    """Read and write tensors as they are: nothing enters autograd, and no subclass intervenes."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        yield


class Snapshot:
    """The state of a module at one moment; `take` makes one, `restore` goes back to it, any number of times.

    >>> from fxopt_core import iter_nodes
    >>> import operator
    >>> graph_module = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    >>> snapshot = Snapshot.take(graph_module)
    >>> graph_module.graph.erase_node(graph_module.graph.output_node())
    >>> del graph_module.weight
    >>> snapshot.restore()
    ()
    >>> graph_module.graph.lint()
    >>> [node.name for node in iter_nodes(graph_module.graph)], tuple(graph_module.weight.shape)
    (['input_1', 'weight', 'bias', 'linear', 'output'], (2, 2))
    """

    def __init__(self, module: nn.Module) -> None:
        with collector_paused(), _raw_tensors():
            self._containers = Containers()
            self._tree = Tree(module, self._containers)
            found = [state.module for state in self._tree.modules.values() if isinstance(state.module, GraphModule)]
            self._classes = [ClassState(cls) for each in found for cls in own_classes(each)]
            graphs = {id(each.graph): each.graph for each in found}
            self._graphs = [GraphState(graph, self._containers) for graph in graphs.values()]

    @classmethod
    def take(cls, module: nn.Module, *, protect_values: bool | Iterable[Tensor] = False) -> Snapshot:
        """Record a module, with all modules below it, nested graph modules and their graphs included.

        ``protect_values`` copies the contents of all tensors too, or of these, so that `restore` also undoes writes in
        place. It takes as much memory as the tensors do.
        """
        snapshot = cls(module)
        tensors = snapshot._tree.tensors
        if protect_values is True:
            snapshot._protect(tensors.values())
        elif protect_values:
            snapshot._protect(tensors[each] for each in dict.fromkeys(map(id, protect_values)))
        return snapshot

    def _protect(self, tensors: Iterable[TensorState]) -> None:
        storages: dict[int, torch.UntypedStorage] = {}
        with collector_paused(), _raw_tensors():
            for tensor in tensors:
                tensor.protect(storages)

    def release(self, tensor: Tensor, rebuild: Rebuild) -> bool:
        """Let go of one tensor, so that its memory is freed as soon as the caller of this drops it as well.

        From here on the snapshot refers to the tensor, and to the modules that hold it, only weakly. If they are gone
        when restoring, `rebuild` makes the contents again, in the same shape and dtype and on the same device;
        `requires_grad`, attributes, gradient and ties come from the record. A tensor that someone else holds comes back
        itself.

        Returns:
            Whether the snapshot knows the tensor; one that came after it does not concern it.
        """
        state = self._tree.release(tensor)
        if state is not None:
            state.release(rebuild)
        return state is not None

    def restore(self) -> tuple[str, ...]:
        """Put everything back.

        Returns:
            Full names of the tensors whose contents may still differ, because they were written in place since: known
            by their version counters, which writes through `.data` and into inference tensors do not move. Empty where
            the snapshot protects values; they have been copied back then.

        Raises:
            FxoptError: something could not be restored, such as a released tensor that is gone and was not rebuilt; all
                else is.
        """
        written: dict[str, None] = {}
        failures: list[tuple[str, Exception]] = []
        done: set[int] = set()
        tensors, modules = self._tree.tensors.values(), self._tree.modules.values()
        # A gradient is set to a tensor of its own form: so all have their contents before any gets its flags.
        steps: list[tuple[ModuleState | TensorState, Callable[[], bool | None]]] = [
            *((each, partial(each.restore_contents, done)) for each in tensors),
            *((each, each.restore_flags) for each in tensors),
            *((each, each.restore) for each in modules),
        ]
        with collector_paused(), _raw_tensors(), ExitStack() as after:
            after.callback(changed)
            for module in modules:
                module.revive()
            for state, step in steps:
                try:
                    if step() is False:
                        written[state.name] = None
                except Exception as error:  # one failure does not keep the rest from being restored
                    failures.append((state.name or "the graph module", error))
            for cls in self._classes:
                cls.restore()
            for graph in self._graphs:
                graph.restore()
            self._containers.restore()
        if failures:
            names = ", ".join(dict.fromkeys(name for name, _ in failures))
            raise FxoptError(f"rollback restored everything but {names}: {failures[0][1]}") from failures[0][1]
        return tuple(written)


@contextmanager
def kept(module: nn.Module) -> Iterator[None]:
    """Bring a module back at the end of a ``with`` block that runs or traces it, and torch's CPU random numbers.

    That is all that a `Snapshot` restores, and the values of tensors that are neither parameters nor buffers.

    >>> linear = nn.Linear(2, 2)
    >>> linear.seen, linear.total = [], torch.zeros(1)
    >>> with kept(linear):
    ...     linear.seen.append(1)
    ...     linear.total += 1
    ...     linear.extra = nn.ReLU()
    >>> linear.seen, linear.total, hasattr(linear, "extra")
    ([], tensor([0.]), False)
    """
    snapshot = Snapshot.take(module)
    snapshot._protect(state for state in snapshot._tree.tensors.values() if not state.registered)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        try:
            snapshot.restore()
        except KeyboardInterrupt:
            snapshot.restore()  # once more, from the beginning
            raise
