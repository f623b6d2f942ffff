"""The modules of a graph module without values, on which passes are taken back to find the original keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy

from fxopt_core.errors import CheckpointError
from fxopt_core.key_map import Kind
from fxopt_core.key_order import KeyOrders
from fxopt_core.ledger import Derived, Record
from fxopt_core.ledger_rows import ModuleAdded, ModuleRemoved, ModuleRow, Neutral, Piece, TensorRemoved, TensorRow


@dataclass(eq=False)
class TracedTensor:
    """A tensor at some time: made by a pass, or original.

    Attributes:
        name: its full name; for an original tensor with several names, the first.
        shape: its shape.
        dtype: its dtype then.
        pass_name: the pass that made it; None for an original one.
        key: its full name now, None where it was taken out.
        parts: what fills its regions.
        fills: what stands in elsewhere.
        derivation: what computes it.
        beside: where its value was dropped, the new tensor made in place of it.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    pass_name: str | None = None
    key: str | None = None
    parts: list[tuple[TracedTensor, Piece]] = field(default_factory=list)
    fills: list[Neutral] = field(default_factory=list)
    derivation: TracedDerivation | None = None
    beside: TracedTensor | None = None
    live: Tensor | None = None


@dataclass(eq=False)
class TracedDerivation:
    """A function with the tensors that it reads and makes."""

    derived: Derived
    inputs: list[TracedTensor | None]
    outputs: list[TracedTensor | None]
    pass_name: str


@dataclass(eq=False)
class _Shell:
    """A module without values: its own tensors and children by name."""

    parameters: dict[str, TracedTensor | None] = field(default_factory=dict)
    buffers: dict[str, TracedTensor | None] = field(default_factory=dict)
    children: dict[str, _Shell] = field(default_factory=dict)
    transient: set[str] = field(default_factory=set)
    has_extra_state: bool = False


@dataclass
class Entry:
    """A name in the original ``state_dict``, or at its place beside it."""

    key: str
    kind: Kind
    tensor: TracedTensor | None
    persistent: bool


class ModuleTree:
    """The modules of a graph module as shells, on which passes are taken back."""

    def __init__(self, graph_module: GraphModule) -> None:
        self._known: dict[int, _Shell] = {}
        self._tensors: dict[int, TracedTensor] = {}
        self._orders = KeyOrders()
        self._root = self._shell(graph_module)

    def _shell(self, module: nn.Module) -> _Shell:
        if id(module) in self._known:
            return self._known[id(module)]
        shell = self._known[id(module)] = _Shell(transient=set(module._non_persistent_buffers_set))
        shell.parameters = {key: self._tensor(tensor) for key, tensor in module._parameters.items()}
        shell.buffers = {key: self._tensor(tensor) for key, tensor in module._buffers.items()}
        shell.has_extra_state = type(module).get_extra_state is not nn.Module.get_extra_state
        children: Mapping[str, nn.Module | None] = module._modules
        shell.children = {key: self._shell(child) for key, child in children.items() if child is not None}
        return shell

    def _tensor(self, tensor: Tensor | None) -> TracedTensor | None:
        if tensor is None:
            return None
        if id(tensor) not in self._tensors:
            shape = None if is_lazy(tensor) else tuple(tensor.shape)
            self._tensors[id(tensor)] = TracedTensor("", shape, tensor.dtype, live=tensor)
        return self._tensors[id(tensor)]

    def take_back(self, record: Record) -> None:
        """Undo a record, as far as names go."""
        for operation in reversed(record.operations or ()):
            if isinstance(operation, ModuleAdded):
                self._remove(operation, record)
            elif isinstance(operation, ModuleRemoved):
                self._insert_module(operation.row, record)
            elif isinstance(operation, TensorRemoved):
                self._insert_tensor(operation.row, record)

    def _find(self, name: str, record: Record) -> _Shell:
        shell = self._root
        for part in name.split(".") if name else ():
            if part not in shell.children:
                raise _edited(record, f"module `{name}` is gone")
            shell = shell.children[part]
        return shell

    def _remove(self, operation: ModuleAdded, record: Record) -> None:
        shell = self._find(operation.name, record)
        tensors = {**shell.parameters, **shell.buffers}
        found = {key: None if tensor is None else tensor.shape for key, tensor in tensors.items()}
        if found != dict(operation.shapes):
            made = _shapes(dict(operation.shapes))
            raise _edited(record, f"`{operation.name}` has {_shapes(found)}, expected {made}")
        parent, _, key = operation.name.rpartition(".")
        self._orders.of(self._find(parent, record).children).remove(key)

    def _insert_module(self, row: ModuleRow, record: Record) -> None:
        shell = _Shell()
        for tensor in row.tensors:
            key = tensor.name.rpartition(".")[2]
            (shell.parameters if tensor.is_parameter else shell.buffers)[key] = _before(tensor)
            if not tensor.persistent:
                shell.transient.add(key)
        parent_name, _, key = row.name.rpartition(".")
        parent = self._find(parent_name, record)
        if any(key in names for names in (parent.children, parent.parameters, parent.buffers)):
            raise _edited(record, f"there is another `{row.name}`")
        self._orders.of(parent.children).insert_after(row.previous, key, shell)

    def _insert_tensor(self, row: TensorRow, record: Record) -> None:
        owner_name, _, key = row.name.rpartition(".")
        owner = self._find(owner_name, record)
        if any(key in names for names in (owner.children, owner.parameters, owner.buffers)):
            raise _edited(record, f"there is another `{row.name}`")
        names = owner.parameters if row.is_parameter else owner.buffers
        self._orders.of(names).insert_after(row.previous, key, _before(row))
        if not row.persistent:
            owner.transient.add(key)

    def entries(self) -> list[Entry]:
        """Return the entries of the original model, in the order of its ``state_dict``."""
        self._orders.apply()
        return list(_entries(self._root, ""))


def _before(row: TensorRow) -> TracedTensor | None:
    """Return a tensor as it was before a pass took it out."""
    return None if row.dtype is None and row.piece is None else TracedTensor("", row.shape, row.dtype)


def _entries(shell: _Shell, prefix: str) -> Iterator[Entry]:
    for key, tensor in shell.parameters.items():
        yield Entry(prefix + key, "parameter", tensor, True)
    for key, tensor in shell.buffers.items():
        yield Entry(prefix + key, "buffer", tensor, not (key in shell.transient or is_baked(prefix + key)))
    if shell.has_extra_state:
        yield Entry(f"{prefix}{nn.modules.module._EXTRA_STATE_KEY_SUFFIX}", "extra-state", None, True)
    for key, child in shell.children.items():
        yield from _entries(child, f"{prefix}{key}.")


def is_baked(key: str) -> bool:
    """Return whether a name is that of a constant which torch.fx found while tracing: no model has it."""
    return re.fullmatch(r"_tensor_constant\d+", key) is not None


def _shapes(shapes: Mapping[str, tuple[int, ...] | None]) -> str:
    return ", ".join(f"{key} {shape}" for key, shape in shapes.items() if shape is not None) or "no tensors"


def _edited(record: Record, found: str) -> CheckpointError:
    return CheckpointError(
        f"{found}. Pass `{record.pass_name}` left it otherwise, so the module was edited by other means than fxopt "
        "since. Nothing was loaded or changed; apply the passes to the original model again"
    )
