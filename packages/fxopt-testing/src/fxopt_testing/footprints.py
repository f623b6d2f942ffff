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
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxopt_core import iter_nodes

_PLAIN = (int, str, bool, float, complex, bytes, type(None), torch.dtype, torch.device, torch.layout)
_CONTAINERS = (dict, list, set, deque, bytearray)
_NODE_FIELDS = ("op", "target", "_args", "_kwargs", "name", "type", "_sort_key", "_erased", "_repr_fn", "graph")
_CLASS_FIELDS_LEFT_OUT = ("__dict__", "__weakref__", "__doc__", "__abstractmethods__", "_abc_impl")


class Footprint:
    """The state of some modules at one moment, as a mapping of paths to values that compare.

    Args:
        roots: the modules.
        identities: whether tensors, modules and containers have to be the very same ones. Otherwise only ties and
            shared memory count, and nothing is kept alive: a snapshot promises no more for large released tensors.
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
        elif isinstance(value, types.MethodType):
            self.rows[path] = self._same(value.__func__, path, always=True), self._same(value.__self__, path)
        else:
            self.rows[path] = self._same(value, path, always=True)

    def _container(self, value: Any, path: str) -> None:
        self.rows[path] = type(value), self._same(value, path), len(value)
        if not self._first(value, path):
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
        for name, value in vars(graph).items():
            self._value(value, f"{path}.{name}")
        for part in (graph._graph_namespace, graph._codegen, graph._find_nodes_lookup_table):
            self._attributes(vars(part), f"{path}.{type(part).__name__}")
        for number, node in enumerate([graph._root, *iter_nodes(graph)]):
            self._node(node, f"{path} node {number} ({node.name})")

    def _node(self, node: Node, path: str) -> None:
        neighbours = (node, node._prev, node._next, *node.users, "inputs", *node._input_nodes)
        self.rows[path] = tuple(self._same(each, path, always=True) for each in neighbours)
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


def values_of(module: nn.Module) -> list[object]:
    """Return the structure and contents of a module without identities, to compare it with a twin."""
    rows: list[object] = [(name, type(child).__name__, child.training) for name, child in module.named_modules()]
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            rows.append((name, tensor.dtype, tensor.requires_grad, tuple(tensor.shape), _bits(tensor)))
        else:  # a state of a module's own
            rows.append((name, repr(tensor)))
    if isinstance(module, GraphModule):
        rows.extend(map(_node_text, iter_nodes(module.graph)))
        rows.append(module.code)
    return rows


def _node_text(node: Node) -> object:
    texts = (node.op, target_text(node.target), str(node.args), str(node.kwargs), *map(str, node.users))
    return (node.name, *texts, tuple(key for key in node.meta if key != "fxopt"))


def target_text(target: object) -> str:
    """Return the name of the function, module or attribute that a node calls or reads."""
    return target if isinstance(target, str) else getattr(target, "__qualname__", None) or str(target)


def bits_of(outputs: object) -> list[object]:
    """Return the bits of all tensors in outputs of any structure."""
    leaves: Iterable[object] = torch.utils._pytree.tree_leaves(outputs)
    return [_bits(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _bits(tensor: Tensor) -> object:
    return tensor.dtype, tuple(tensor.shape), contents_of(tensor)


def contents_of(tensor: Tensor) -> bytes | None:
    """Return what a tensor holds, bit for bit; None if it has no values."""
    if tensor.is_meta or isinstance(tensor, FakeTensor) or nn.parameter.is_lazy(tensor):
        return None
    plain = tensor.detach().to_dense().cpu().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.numel() else b""
