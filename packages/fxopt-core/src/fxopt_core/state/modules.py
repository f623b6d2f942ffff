"""What a snapshot keeps of a module tree, strongly at first and only weakly where a pass has released a tensor.

A module's record refers to its tensors and child modules through their records, never directly. Releasing a tensor
therefore takes one step: its record, and those of the modules above it, fall back to weak references. If the object is
still alive when restoring (a caller's model shares it), that very object returns; if nobody but the snapshot knew it,
a new one is built from the record, and nobody is left to tell the difference.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import Tensor, nn

from fxopt_core.state.containers import CONTAINERS, Container, Containers, Contents, put_back, shallow_copy
from fxopt_core.state.tensors import TensorState

_PLAIN, _TENSOR, _CONTAINER, _TUPLE = range(4)
_LEAVES = frozenset({bool, int, float, str, type(None)})
_MOSTLY_EMPTY = frozenset({dict, OrderedDict, list, set})
_REGISTERED = frozenset({"_parameters", "_buffers"})


class _Kinds(dict[type, int]):
    """Which classes of attributes need more than a reference, looked up once for each class."""

    def __missing__(self, cls: type) -> int:
        kinds = ((Tensor, _TENSOR), (CONTAINERS, _CONTAINER), (tuple, _TUPLE), (object, _PLAIN))
        kind = self[cls] = next(kind for bases, kind in kinds if issubclass(cls, bases))
        return kind


class ModuleState:
    """One module: its class, its attributes, the contents of its containers, and the records of its parents."""

    __slots__ = ("attributes", "cls", "contents", "module", "name", "namespace", "parents", "reference", "root")

    def __init__(self, module: nn.Module, name: str, *, root: bool = False) -> None:
        self.module: nn.Module | None = module
        self.name = name
        self.root = root
        self.cls = type(module)
        self.namespace: dict[str, Any] | None = module.__dict__
        self.attributes: dict[str, Any] = module.__dict__.copy()
        self.contents: dict[str, Contents] = {}
        self.parents: list[ModuleState] = []
        self.reference: weakref.ref[nn.Module] | None = None

    def loosen(self) -> None:
        """Hold this module and those above it weakly, the root excepted, so that what they drop is really freed."""
        if self.root or self.module is None:
            return
        self.reference = weakref.ref(self.module)
        self.module = self.namespace = None
        for key, contents in self.contents.items():
            if _holds_states(contents):
                self.attributes[key] = type(self.attributes[key])
        for parent in self.parents:
            parent.loosen()

    def close(self) -> None:
        """Let go of the records of others, each of which refers to this one."""
        self.attributes = self.contents = _NO_RECORDS
        self.parents = _NO_PARENTS

    def revive(self) -> nn.Module:
        """Return the module, a new one of its class if it is gone; its attributes are set by `restore`."""
        if self.module is None:
            assert self.reference is not None
            alive = self.reference()
            self.module = object.__new__(self.cls) if alive is None else alive
        return self.module

    def restore(self) -> None:
        """Put class, attributes and contents back; all records of the tree have been revived."""
        module = self.revive()
        now = dict(module.__dict__)
        attributes = {key: _object_of(value) for key, value in self.attributes.items()}
        for key, value in attributes.items():
            if key in self.contents:
                attributes[key] = self._container(key, now)
                put_back(attributes[key], _objects_of(self.contents[key]))
            elif isinstance(value, CONTAINERS):
                put_back(value, [])
        if self.namespace is not None and module.__dict__ is not self.namespace:
            object.__setattr__(module, "__dict__", self.namespace)
        put_back(module.__dict__, attributes)
        if type(module) is not self.cls:
            module.__class__ = self.cls

    def _container(self, key: str, now: dict[str, Any]) -> Any:
        """The container object to fill; a loosened one could not be held, so the present or a new one takes over."""
        kept = self.attributes[key]
        if not isinstance(kept, type):
            return kept
        return now[key] if type(now.get(key)) is kept else kept()


class Tree:
    """The records of a module tree, made in one walk; every module and tensor has one, under however many names."""

    def __init__(self, root: nn.Module, containers: Containers) -> None:
        self.modules: dict[int, ModuleState] = {}
        self.tensors: dict[int, TensorState] = {}
        self._kinds = _Kinds()
        self._nested: list[tuple[ModuleState, str, Iterable[object]]] = []
        self.root = self._record(root, "", root=True)
        waiting = [self.root]
        while waiting:
            state = waiting.pop()
            waiting.extend(reversed(self._children(state)))
        self._record_nested(containers)

    def plain_tensors(self) -> list[TensorState]:
        """Return the records of the tensors that are neither parameters nor buffers."""
        groups = (state.contents.get(group) for state in self.modules.values() for group in ("_parameters", "_buffers"))
        registered = {id(each) for group in groups if isinstance(group, dict) for each in group.values()}
        return [state for state in self.tensors.values() if id(state) not in registered]

    def close(self) -> None:
        """Let go of all modules and tensors."""
        for module in self.modules.values():
            module.close()
        for tensor in self.tensors.values():
            if tensor.inner or tensor.grad is not None:
                tensor.close()
        self.modules, self.tensors = {}, {}

    def _record(self, module: nn.Module, name: str, *, root: bool = False) -> ModuleState:
        state = self.modules[id(module)] = ModuleState(module, name, root=root)
        for key, value in module.__dict__.items():
            cls = type(value)
            if cls in _LEAVES or (cls in _MOSTLY_EMPTY and not value):
                continue  # most attributes are such, and one that is empty needs no contents
            kind = self._kinds[cls]
            if kind == _TENSOR:
                state.attributes[key] = self._tensor(state, value, key)
            elif kind == _TUPLE:
                if not _LEAVES.issuperset(map(type, value)):  # sizes and strides hold nothing that changes
                    self._nested.append((state, key, value))
            elif kind == _CONTAINER and value:
                state.contents[key] = self._contents(state, value, key)
        return state

    def _contents(self, owner: ModuleState, container: Container, key: str) -> Contents:
        contents, prefix = shallow_copy(container), ""
        if key == "_modules":
            return contents
        if key not in _REGISTERED:
            prefix = f"{key}."
            self._nested.append((owner, key, container.values() if isinstance(container, dict) else list(container)))
        if isinstance(contents, (dict, list)):
            items = contents.items() if isinstance(contents, dict) else enumerate(contents)
            for item, value in items:  # which may be replaced meanwhile, as none is added
                if isinstance(value, Tensor):
                    contents[item] = self._tensor(owner, value, f"{prefix}{item}")
        return contents

    def _record_nested(self, containers: Containers) -> None:
        """Record what the containers in attributes hold; tensors are rare there, and get their names afterwards."""
        tensors = containers.add(chain.from_iterable(values for _, _, values in self._nested))
        if any(id(tensor) not in self.tensors for tensor in tensors):
            for state, key, values in self._nested:
                for tensor in Containers().add(values):
                    self._tensor(state, tensor, f"{key}[...]")

    def _tensor(self, owner: ModuleState, tensor: Tensor, key: str) -> TensorState:
        state = self.tensors.get(id(tensor))
        if state is None:
            state = self.tensors[id(tensor)] = TensorState(tensor, owner, key)
        else:
            state.also_in(owner)
        return state

    def _children(self, parent: ModuleState) -> list[ModuleState]:
        """Replace the child modules in a record by their records, and return those that were not known before."""
        children = parent.contents.get("_modules")
        if not isinstance(children, dict):
            return []
        prefix = f"{parent.name}." if parent.name else ""
        fresh = []
        for key, child in children.items():
            if not isinstance(child, nn.Module):
                continue
            state = self.modules.get(id(child))
            if state is None:
                state = self._record(child, prefix + key)
                fresh.append(state)
            state.parents.append(parent)
            children[key] = state
        return fresh


_NO_RECORDS: dict[str, Any] = {}
_NO_PARENTS: list[ModuleState] = []


def _holds_states(contents: Contents) -> bool:
    values = contents.values() if isinstance(contents, dict) else contents
    return any(isinstance(value, (TensorState, ModuleState)) for value in values)


def _object_of(value: Any) -> Any:
    if isinstance(value, TensorState):
        return value.tensor
    return value.module if isinstance(value, ModuleState) else value


def _objects_of(contents: Contents) -> Contents:
    if isinstance(contents, dict):
        return {key: _object_of(value) for key, value in contents.items()}
    return [_object_of(value) for value in contents] if isinstance(contents, list) else contents
