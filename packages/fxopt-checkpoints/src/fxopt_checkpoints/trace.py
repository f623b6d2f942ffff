"""`key_map`: from the journals of the passes that rewrote a graph module back to the keys of the original model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy

from fxopt_checkpoints._torch import EXTRA_STATE
from fxopt_checkpoints.key_map import KeyMap
from fxopt_checkpoints.tensor_map import Assembly, Derivation, Kind, NewTensor, OriginalTensor, Part, Step
from fxopt_core import (
    Derived,
    Record,
    check_graph_module,
    collector_paused,
    find_ledger,
    iter_nodes,
    ledger_of,
    tag_of,
)
from fxopt_core.errors import CheckpointError
from fxopt_rewrite import (
    EditVisitor,
    KeyOrders,
    ModuleAdded,
    ModuleRemoved,
    ModuleRow,
    Neutral,
    Piece,
    TensorRemoved,
    TensorRow,
    edits_of,
)


def key_map(graph_module: GraphModule) -> KeyMap:
    """Return which tensors of the original model became which of a rewritten one.

    It covers all passes that are applied and not undone, in order.

    Args:
        graph_module: the rewritten module.

    Returns:
        The map. It does not depend on values, and is the same before and after training.

    Raises:
        PreconditionError: The argument is not a graph module.
        CheckpointError: A pass changed keys without recording how, the module has since been edited by other means, or
            its ledger was lost.

    >>> print(key_map(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3)))))
    2 keys are unchanged
    """
    check_graph_module(graph_module, "key_map")
    nodes = [] if find_ledger(graph_module) is not None else iter_nodes(graph_module.graph)
    rewritten = next((node for node in nodes if tag_of(node).id is not None), None)
    if rewritten is not None:
        raise CheckpointError(
            f"node `{rewritten.name}` was rewritten, and this graph module has no ledger that says how, so that the "
            "original keys are not known. A graph module that is made from another one's graph starts without a "
            "ledger; copy it with `new.meta.update(old.meta)`"
        )
    # Traced anew each time: records are undone in many orders, so that a map made earlier would not stay right.
    records = [record for record in ledger_of(graph_module).records if record.state == "applied" and record.changed]
    for record in records:
        if record.rekeyed:
            raise CheckpointError(
                f"pass `{record.pass_name}` changed names or shapes of parameters or buffers and did not record how, "
                "so that the original keys are not known. Write it with fxopt_rewrite.Editor, as "
                "docs/writing-passes.md shows, or undo it first"
            )
        if record.has_lost_edits:
            raise CheckpointError(
                f"the record of pass `{record.pass_name}` names what it replaced, but has lost the edits that say how, "
                "so that the original keys are not known: something other than fxopt changed the ledger. Use a copy "
                "whose ledger is intact"
            )
    with collector_paused():
        tree = _Tree(graph_module)
        for record in reversed(records):
            tree.take_back(record)
        return tree.key_map()


def is_baked(key: str) -> bool:
    """Return whether a name is that of a constant from torch.fx tracing, which no model has."""
    return re.fullmatch(r"_tensor_constant\d+", key) is not None


@dataclass(eq=False)
class _Tensor:
    """A tensor at some time: original, or made by a pass."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None  # when it was removed or made, or now
    live: Tensor | None = None  # the tensor itself, if the module still has it
    persistent: bool = True
    name: str = ""  # its full name when a pass made it
    label: str = ""  # its name in the steps
    made_by: str | None = None  # a pass; None for an original one
    parts: list[tuple[_Tensor, Piece]] = field(default_factory=list)  # the tensors that fill its regions
    fills: list[Neutral] = field(default_factory=list)  # the constants in its other regions
    derivation: _Derivation | None = None  # the function that computes it


@dataclass(eq=False)
class _Derivation:
    """A function with the tensors that it reads and makes."""

    derived: Derived
    inputs: list[_Tensor | None]
    outputs: list[_Tensor | None]
    pass_name: str


@dataclass(eq=False)
class _Module:
    """A module without values: its own tensors and children by name."""

    parameters: dict[str, _Tensor | None] = field(default_factory=dict)
    buffers: dict[str, _Tensor | None] = field(default_factory=dict)
    children: dict[str, _Module] = field(default_factory=dict)
    has_extra_state: bool = False

    def tensors_like(self, row: TensorRow) -> dict[str, _Tensor | None]:
        """Return the dictionary, of parameters or of buffers, that a tensor belongs to."""
        return self.parameters if row.is_parameter else self.buffers


_Entry = tuple[OriginalTensor, _Tensor | None]


class _Tree(EditVisitor):
    """The modules of a graph module without values, on which passes are taken back, the latest first."""

    def __init__(self, graph_module: GraphModule) -> None:
        self._known: dict[int, _Module] = {}
        self._orders = KeyOrders()
        self._top = self._module(graph_module)
        self._made: list[_Tensor] = []  # by passes, the latest first
        self._start("")

    def _module(self, module: nn.Module) -> _Module:
        if id(module) not in self._known:
            made = self._known[id(module)] = _Module()
            made.parameters = {key: _live(tensor) for key, tensor in module._parameters.items()}
            transient = module._non_persistent_buffers_set
            made.buffers = {key: _live(tensor, key not in transient) for key, tensor in module._buffers.items()}
            made.has_extra_state = type(module).get_extra_state is not nn.Module.get_extra_state
            children: Mapping[str, nn.Module | None] = module._modules
            made.children = {key: self._module(child) for key, child in children.items() if child is not None}
        return self._known[id(module)]

    def _start(self, pass_name: str) -> None:
        """Clear the notes of another record; lists have the latest first."""
        self._pass_name = pass_name
        self._added: dict[str, list[_Tensor]] = {}  # by name
        self._dropped: dict[str, list[_Tensor]] = {}  # by name
        self._parts: dict[str, list[tuple[_Tensor, Piece]]] = {}  # by the name of the new tensor that they fill
        self._fills: dict[str, list[Neutral]] = {}  # likewise

    def take_back(self, record: Record) -> None:
        """Undo a record in terms of names, and note what became of the tensors that it removed."""
        self._start(record.pass_name)
        for edit in reversed(edits_of(record)):
            edit.accept(self)
        # After the edits, which say which tensors these names stood for during the pass.
        for derived in record.derived:
            self._derive(derived)

    def _find(self, name: str) -> _Module:
        module = self._top
        for part in name.split(".") if name else ():
            if part not in module.children:
                raise self._edited(f"module `{name}` is gone")
            module = module.children[part]
        return module

    def _tensor(self, name: str) -> _Tensor | None:
        owner, _, key = name.rpartition(".")
        module = self._find(owner)
        return module.parameters.get(key) or module.buffers.get(key)

    def _edited(self, found: str) -> CheckpointError:
        return CheckpointError(
            f"{found}. Pass `{self._pass_name}` left it in another state, so something other than fxopt has edited "
            "the module since. Nothing was loaded or changed; apply the passes to the original model again"
        )

    def module_added(self, edit: ModuleAdded) -> None:
        """Remove the module; its tensors are made here."""
        module = self._find(edit.name)
        tensors = {**module.parameters, **module.buffers}
        found = {key: None if tensor is None else tensor.shape for key, tensor in tensors.items()}
        if found != dict(edit.shapes):
            raise self._edited(f"`{edit.name}` has {_shapes(found)}, expected {_shapes(dict(edit.shapes))}")
        parent, _, key = edit.name.rpartition(".")
        self._orders.of(self._find(parent).children).remove(key)
        made = []
        for (key, _), dtype in zip(edit.shapes, edit.dtypes or [None] * len(edit.shapes), strict=True):
            tensor = tensors[key]
            if tensor is not None:
                tensor.name, tensor.made_by = f"{edit.name}.{key}", self._pass_name
                # The module may have been converted since; the edit has the dtype in which the tensor was made.
                tensor.dtype = tensor.dtype if tensor.live is None else dtype
                tensor.parts = self._parts.pop(tensor.name, [])[::-1]
                tensor.fills = self._fills.pop(tensor.name, [])[::-1]
                self._added.setdefault(tensor.name, []).append(tensor)
                made.append(tensor)
        self._made += reversed(made)

    def module_removed(self, edit: ModuleRemoved) -> None:
        """Restore the module."""
        row, module = edit.row, _Module()
        before = {tensor.name: self._before(tensor) for tensor in reversed(row.tensors)}  # the latest first
        for tensor in row.tensors:
            module.tensors_like(tensor)[tensor.name.rpartition(".")[2]] = before[tensor.name]
        self._orders.of(self._parent(row).children).insert_after(row.previous, row.name.rpartition(".")[2], module)

    def tensor_removed(self, edit: TensorRemoved) -> None:
        """Restore the tensor."""
        row, tensors = edit.row, self._parent(edit.row).tensors_like(edit.row)
        self._orders.of(tensors).insert_after(row.previous, row.name.rpartition(".")[2], self._before(row))

    def neutral(self, edit: Neutral) -> None:
        """Note the constant that fills a region of a new tensor."""
        self._fills.setdefault(edit.piece.key, []).append(edit)

    def _parent(self, row: ModuleRow | TensorRow) -> _Module:
        """Return the module into which a tensor or module is restored."""
        parent_name, _, key = row.name.rpartition(".")
        parent = self._find(parent_name)
        if any(key in names for names in (parent.children, parent.parameters, parent.buffers)):
            raise self._edited(f"there is another `{row.name}`")
        return parent

    def _before(self, row: TensorRow) -> _Tensor | None:
        """Return a tensor as it was before a pass removed it, and note where its values went."""
        # The layer had no such tensor, as nn.Linear(bias=False) has no bias.
        if row.dtype is None and row.piece is None:
            return None
        tensor = _Tensor(row.shape, row.dtype, persistent=row.persistent)
        if row.piece is not None:
            self._parts.setdefault(row.piece.key, []).append((tensor, row.piece))
        else:
            # Its values are gone, unless a function of the record computes something from them.
            self._dropped.setdefault(row.name, []).append(tensor)
        return tensor

    def _derive(self, derived: Derived) -> None:
        names = [name for _, name in derived.inputs]
        inputs = [None if name is None else _earliest(self._dropped, name) or self._tensor(name) for name in names]
        outputs = [None if name is None else _earliest(self._added, name) for name in derived.outputs]
        for name, tensor in (*zip(names, inputs, strict=True), *zip(derived.outputs, outputs, strict=True)):
            if name is not None and tensor is None:
                raise CheckpointError(
                    f"pass `{self._pass_name}` recorded that `{derived.function}` computes tensors with "
                    f"`{name}`, which it neither removed nor added; its call of Editor.derived has to give the exact "
                    "names of inputs and outputs"
                )
        item = _Derivation(derived, inputs, outputs, self._pass_name)
        for output in outputs:
            if output is not None:
                output.derivation = item

    def key_map(self) -> KeyMap:
        """Return the map, after all records have been taken back."""
        self._orders.apply()
        self._made.reverse()
        entries = list(_entries(self._top, ""))
        ties = _set_labels(entries, self._made)
        # A tensor is made from earlier ones, so in the order in which they were made each comes after its sources.
        items = dict.fromkeys(tensor.derivation or tensor for tensor in self._made)
        steps = (_step(item) for item in items if isinstance(item, _Derivation) or item.parts or item.fills)
        return KeyMap(tuple(row for row, _ in entries), tuple(steps), ties)


def _earliest(found: Mapping[str, list[_Tensor]], name: str) -> _Tensor | None:
    # A pass may use a name several times; lists have the latest tensor first.
    return found[name].pop() if found.get(name) else None


def _live(tensor: Tensor | None, persistent: bool = True) -> _Tensor | None:
    shape = None if tensor is None or is_lazy(tensor) else tuple(tensor.shape)
    return None if tensor is None else _Tensor(shape, tensor.dtype, tensor, persistent)


def _shapes(shapes: Mapping[str, tuple[int, ...] | None]) -> str:
    return ", ".join(f"{key} {shape}" for key, shape in shapes.items() if shape is not None) or "no tensors"


def _entries(module: _Module, prefix: str) -> Iterator[_Entry]:
    """Yield the entries of the original model, in the order of its ``state_dict``."""
    for key, tensor in module.parameters.items():
        yield _entry(prefix + key, "parameter", tensor)
    for key, tensor in module.buffers.items():
        yield _entry(prefix + key, "buffer", tensor)
    if module.has_extra_state:
        yield _entry(prefix + EXTRA_STATE, "extra-state", None)
    for key, child in module.children.items():
        yield from _entries(child, f"{prefix}{key}.")


def _entry(key: str, kind: Kind, tensor: _Tensor | None) -> _Entry:
    if tensor is None:
        return OriginalTensor(key, None, None, kind), None
    persistent, kept = tensor.persistent and not is_baked(key), tensor.live is not None
    return OriginalTensor(key, tensor.shape, tensor.dtype, kind, persistent, kept), tensor


def _set_labels(entries: Iterable[_Entry], made: Iterable[_Tensor]) -> tuple[tuple[str, ...], ...]:
    """Set the label of each tensor; return the groups of keys that are one tensor.

    Original tensors are one if they are one now, or if they went into the same region.
    """
    regions: dict[int, object] = {}
    for target in made:
        for source, piece in target.parts:
            regions.setdefault(id(source), (id(target), piece))
    groups: dict[object, list[str]] = {}
    used: dict[str, int] = {}
    for row, tensor in entries:
        used[row.key] = 1
        if tensor is not None:
            token = regions.get(id(tensor), id(tensor)) if tensor.live is None else _identity(tensor.live)
            group = groups.setdefault(token, [])
            group.append(row.key)
            tensor.label = group[0]
    for tensor in made:
        tensor.label = tensor.name
        while tensor.label in used:
            used[tensor.name] += 1
            tensor.label = f"{tensor.name}#{used[tensor.name]}"
        used[tensor.label] = 1
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _identity(tensor: Tensor) -> object:
    """Return a key that is equal for tensors that are one: tied, or the same view of the same memory."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or is_lazy(tensor):
        return id(tensor)
    # The storage itself, since data_ptr is 0 for all tensors on the meta device.
    place = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return (*place, tensor.dtype, tuple(tensor.shape), tensor.stride())


def _step(item: _Tensor | _Derivation) -> Step:
    if isinstance(item, _Derivation):
        sources = [None if tensor is None else tensor.label for tensor in item.inputs]
        return Derivation(
            function=item.derived.function,
            inputs=tuple(zip((name for name, _ in item.derived.inputs), sources, strict=True)),
            settings=item.derived.settings,
            outputs=tuple(None if tensor is None else _new(tensor) for tensor in item.outputs),
            restore=item.derived.restore,
            pass_name=item.pass_name,
        )
    # Pieces name tensors as they were called then, and another tensor may have that name now. Tied originals fill one
    # region under one label: one part is enough.
    parts = [Part(source.label, replace(piece, key=item.label)) for source, piece in item.parts]
    fills = [Neutral(replace(fill.piece, key=item.label), fill.value) for fill in item.fills]
    return Assembly(_new(item), tuple(dict.fromkeys(parts)), tuple(fills), item.made_by or "")


def _new(tensor: _Tensor) -> NewTensor:
    return NewTensor(tensor.label, None if tensor.live is None else tensor.name, tensor.shape or (), tensor.dtype)
