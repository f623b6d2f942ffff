"""`Footprint`: everything that must be the same after a failure, as plain data that can be compared.

It covers modules of any kind, and the graphs of graph modules: nodes with all their fields and orders, names that are
taken, code, classes, module trees, hooks, flags, plain attributes to any depth of containers, parameters and buffers
with memory and bits, gradients, ties; and the state of the process that a pass could leave changed.

This is the oracle for rollback. It reads torch's private fields itself, so that a mistake in fxopt's record of them
cannot hide.
"""

from __future__ import annotations

import contextvars
import ctypes
import gc
import hashlib
import types
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fxopt_core import iter_nodes

_PLAIN = (int, str, bool, float, complex, bytes, type(None), torch.dtype, torch.device, torch.layout)
_CONTAINERS = (dict, list, set, deque, bytearray)
_NODE_FIELDS = ("op", "target", "_args", "_kwargs", "name", "type", "graph")
_STRUCTURE = ("_root", "_insert", "_len", "_graph_namespace", "_find_nodes_lookup_table")
_CLASS_FIELDS_LEFT_OUT = ("__dict__", "__weakref__", "__doc__", "__abstractmethods__", "_abc_impl")


class Footprint:
    """The state of some modules at one moment, as a mapping of paths to values that compare.

    Args:
        roots: the modules.
        identities: whether tensors, modules and containers have to be the very same ones (nodes never). Otherwise
            only ties and shared memory count, and nothing is kept alive: a snapshot promises no more for large
            released tensors.
    """

    def __init__(self, *roots: nn.Module, identities: bool = True) -> None:
        self.rows: dict[str, object] = {}
        self._identities = identities
        self._kept: list[object] = []  # so that no id is given out again
        self._seen: dict[int, str] = {}
        self._memory: dict[int, str] = {}
        self._alive: list[object] = []
        for number, root in enumerate(roots):
            self._module(root, f"{number}:" if number else "")
        self._ambience()
        self._alive.clear()

    def differences(self, other: Footprint) -> list[str]:
        """Return how another footprint differs, one line for each path."""
        if self.rows == other.rows and list(self.rows) == list(other.rows):
            return []
        paths = dict.fromkeys([*self.rows, *other.rows])
        lines = [
            f"{path}: {_short(self.rows.get(path, 'absent'))} became {_short(other.rows.get(path, 'absent'))}"
            for path in paths
            if self.rows.get(path, self) != other.rows.get(path, self)
        ]
        return lines or ["the order of attributes"]

    def _same(self, item: object, path: str, *, always: bool = False) -> object:
        """Return what identifies an object: its id, or the first path to it where identities do not count."""
        if self._identities or always:
            self._kept.append(item)
            return id(item)
        self._alive.append(item)
        return self._seen.get(id(item), path)

    def _first(self, item: object, path: str) -> bool:
        """Note an object, and return whether this is the first path to it."""
        self._alive.append(item)
        return self._seen.setdefault(id(item), path) is path

    def _value(self, value: object, path: str) -> None:
        if isinstance(value, float):
            self.rows[path] = (float, value.hex())
        elif type(value) in _PLAIN:
            self.rows[path] = (type(value), value)
        elif isinstance(value, Tensor):
            self._tensor(value, path)
        elif isinstance(value, nn.Module):
            self._module(value, path)
        elif isinstance(value, _CONTAINERS):
            self._container(value, path)
        elif isinstance(value, tuple):
            self.rows[path] = (type(value), len(value))
            for number, item in enumerate(value):
                self._value(item, f"{path}[{number}]")
        elif isinstance(value, Graph):
            self._graph(value, path)
        elif isinstance(value, Node):  # a rollback may put an equal one in its place
            self.rows[path] = "node", value.name
        elif isinstance(value, types.MethodType):
            self.rows[path] = self._same(value.__func__, path, always=True), self._same(value.__self__, path)
        else:
            self.rows[path] = self._same(value, path, always=True)

    def _container(self, value: Any, path: str) -> None:
        frozen = isinstance(value, (immutable_list, immutable_dict))  # arguments, equal ones of which are as good
        self.rows[path] = type(value), None if frozen else self._same(value, path), len(value)
        if not (frozen or self._first(value, path)):
            return
        if isinstance(value, bytearray):
            self.rows[f"{path}[:]"] = bytes(value)
        elif isinstance(value, set):
            self.rows[f"{path}{{}}"] = frozenset(map(_hashable, value))
        elif isinstance(value, dict):
            self.rows[f"{path}{{}}"] = tuple(map(_hashable, value))
            for number, (key, item) in enumerate(value.items()):
                self._value(item, f"{path}[{key!r}]" if isinstance(key, str) else f"{path}[#{number}]")
        else:
            for number, item in enumerate(value):
                self._value(item, f"{path}[{number}]")

    def _tensor(self, tensor: Tensor, path: str) -> None:
        self.rows[path] = type(tensor), self._same(tensor, path)
        if not self._first(tensor, path):
            return
        plain = (tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad, tensor.is_leaf)
        self.rows[f"{path}!"] = (*plain, *self._contents(tensor, path))
        self._attributes(vars(tensor), path)
        self._value(tensor._backward_hooks, f"{path}.hooks")
        if tensor.is_leaf and not isinstance(tensor, FakeTensor) and tensor.grad is not None:
            self._tensor(tensor.grad, f"{path}.grad")

    def _contents(self, tensor: Tensor, path: str) -> tuple[object, ...]:
        if nn.parameter.is_lazy(tensor):
            return ("uninitialised",)
        if tensor.layout is not torch.strided:
            return (tuple(tensor.shape), repr(tensor.detach().to_dense().tolist()))
        form = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        if tensor.device.type != "cpu" or type(tensor) not in (Tensor, nn.Parameter):
            return form
        storage = tensor.untyped_storage()
        pointer, size = storage.data_ptr(), storage.nbytes()
        memory: object = pointer if self._identities else self._memory.setdefault(pointer, path)
        bits = ctypes.string_at(pointer, size) if size else b""
        return (*form, memory, hashlib.blake2b(bits).digest())

    def _attributes(self, attributes: dict[str, Any], path: str) -> None:
        self.rows[f"{path}.__dict__"] = tuple(attributes)
        for name, value in attributes.items():
            self._value(value, f"{path}.{name}")

    def _module(self, module: nn.Module, path: str) -> None:
        self.rows[path] = self._same(type(module), path, always=True), self._same(module, path)
        if not self._first(module, path):
            return
        self._attributes(module.__dict__, path)
        if isinstance(module, GraphModule):
            for cls in type(module).__mro__:
                if cls is GraphModule:
                    break
                self._class(cls, f"{path}.__class__")

    def _class(self, cls: type, path: str) -> None:
        attributes = {key: value for key, value in vars(cls).items() if key not in _CLASS_FIELDS_LEFT_OUT}
        self.rows[path] = cls.__qualname__, tuple(attributes)
        for key, value in attributes.items():
            self._value(value, f"{path}.{key}")

    def _graph(self, graph: Graph, path: str) -> None:
        self.rows[path] = self._same(graph, path, always=True)
        if not self._first(graph, path):
            return
        self.rows[f"{path}.__dict__"] = tuple(vars(graph))
        for name, value in vars(graph).items():
            if name not in _STRUCTURE:
                self._value(value, f"{path}.{name}")
        self._attributes(vars(graph._codegen), f"{path}.codegen")
        names = graph._graph_namespace
        self.rows[f"{path} names"] = frozenset(names._used_names), tuple(sorted(names._base_count.items()))
        table = graph._find_nodes_lookup_table.table
        found = ((str(key), tuple(sorted(node.name for node in nodes))) for key, nodes in table.items() if nodes)
        self.rows[f"{path} found by operation"] = graph._len, frozenset(found)
        for number, node in enumerate(iter_nodes(graph)):
            self._node(node, f"{path} node {number} ({node.name})")

    def _node(self, node: Node, path: str) -> None:
        orders = (node._prev, node._next, *node.users, "inputs", *node._input_nodes)
        self.rows[path] = tuple(map(str, orders))
        for name in _NODE_FIELDS:
            self._value(getattr(node, name), f"{path}.{name}")
        self._value(node.meta, f"{path}.meta")
        self._attributes(vars(node), path)

    def _ambience(self) -> None:
        """Add what belongs to the process: modes, the state of random numbers, context variables."""
        state = torch.get_rng_state()
        drawn = hashlib.blake2b(ctypes.string_at(state.data_ptr(), state.nbytes), digest_size=4)
        modes = {
            "gradients": torch.is_grad_enabled(),
            "inference mode": torch.is_inference_mode_enabled(),
            "default dtype": torch.get_default_dtype(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "modes of torch functions": torch._C._len_torch_function_stack(),
            "modes of torch's dispatcher": torch._C._len_torch_dispatch_stack(),
            "guards on sizes": not ShapeEnv._suppress_guards_tls(),
            "garbage collector": gc.isenabled(),
            "random numbers": drawn.hexdigest(),
        }
        self.rows.update({f"process, {name}": value for name, value in modes.items()})
        context = contextvars.copy_context()
        self.rows["context"] = frozenset((variable.name, id(value)) for variable, value in context.items())
        self._kept.append(context)


def _hashable(value: object) -> object:
    """Return a key or an item of a set if it is plain data, else its identity."""
    if isinstance(value, tuple):
        return tuple(map(_hashable, value))
    return (type(value), value) if type(value) in _PLAIN else id(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 160 else f"{text[:80]} ... {text[-60:]}"
