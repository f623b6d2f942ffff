"""The record of one run of one pass: what it rewrote, what it refused, and whether it changed anything."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from fxopt_core.graph import iter_nodes, modules_by_name
from fxopt_core.known_classes import class_path
from fxopt_core.ledger import ModuleAdded, ModuleRemoved, Record, Rewrite, TensorRemoved, ledger_of
from fxopt_core.marks import META_KEY, has_mark
from fxopt_core.module_state import is_plain_data
from fxopt_core.runs import Frame
from fxopt_core.snapshot_tensors import TensorState
from fxopt_core.transaction import Snapshot
from fxopt_core.transformation import ReversibleTransformation, Transformation


def signature_or_empty(transformation: Transformation) -> str:
    """Return a signature, or "" for a pass whose options have no stable value."""
    try:
        return transformation.signature
    except TypeError:
        return ""


class State:
    """A graph module before a pass, as far as it takes to see whether the pass changed anything.

    Nodes and their arguments are held, so that their identity says something; modules and tensors are held weakly, so
    that a pass which drops them frees their memory.
    """

    def __init__(self, graph_module: GraphModule, snapshot: Snapshot | None = None) -> None:
        """Take a graph module down; of its modules, a snapshot of it as it is knows the same already."""
        self._codegen = graph_module.graph._codegen
        self._nodes = list(iter_nodes(graph_module.graph))
        self._fields = list(map(_FIELDS, self._nodes))
        self._snapshot, self._rows = snapshot, None if snapshot is not None else _modules(graph_module)
        self._records = len(ledger_of(graph_module).records)

    @property
    def _modules(self) -> list[tuple[object, ...]]:
        if self._rows is None:
            assert self._snapshot is not None
            self._rows = _recorded_modules(self._snapshot)
        return self._rows

    def names(self) -> set[str]:
        """Return the names of the nodes."""
        return {name for name, *_ in self._fields}

    def marked(self, signature: str) -> set[str]:
        """Return the names of the nodes that have a mark, now."""
        nodes = zip(self._nodes, self._fields, strict=True)
        return {name for node, (name, *_) in nodes if META_KEY in node.meta and has_mark(node, signature)}

    def is_that_of(self, graph_module: GraphModule) -> bool:
        """Return whether a graph module has these nodes, modules, tensors and code generator still, all unchanged."""
        if graph_module.graph._codegen is not self._codegen:
            return False
        nodes = list(iter_nodes(graph_module.graph))
        if len(nodes) != len(self._nodes) or not all(map(is_, nodes, self._nodes)):
            return False
        same = all(map(is_, chain.from_iterable(map(_FIELDS, nodes)), chain.from_iterable(self._fields)))
        return same and _modules(graph_module) == self._modules

    def is_rekeyed(self, graph_module: GraphModule) -> bool:
        """Return whether a graph module has tensors of other names or shapes, for which no record since accounts."""
        since = ledger_of(graph_module).records[self._records :]
        return _replayed(_shapes(self._modules), since) != _shapes(_modules(graph_module))


_FIELDS = attrgetter("name", "op", "target", "_args", "_kwargs")


def _modules(graph_module: GraphModule) -> list[tuple[object, ...]]:
    """Return names, flags, and what is comparable by identity of modules and tensors; equal where nothing changed."""
    rows: list[tuple[object, ...]] = []
    for name, module in modules_by_name(graph_module).items():
        tensors = (*module._parameters.items(), *module._buffers.items())
        rows.append((name, _Same(module), module.training, *[(key, *_state(tensor)) for key, tensor in tensors]))
    return rows


def _recorded_modules(snapshot: Snapshot) -> list[tuple[object, ...]]:
    """Return what `_modules` returned when a snapshot was taken."""
    rows: list[tuple[object, ...]] = []
    for name, module in snapshot.modules_by_name():
        tensors = [*module.items_of("_parameters"), *module.items_of("_buffers")]
        states = [(key, *_recorded_state(tensor)) for key, tensor in tensors]
        rows.append((name, _Same(module.known()), module.attributes["training"], *states))
    return rows


def _recorded_state(tensor: TensorState | None) -> tuple[object, ...]:
    if tensor is None:
        return (None,)
    form, lazy = tensor.form_then(), issubclass(tensor.cls, (UninitializedBuffer, UninitializedParameter))
    shape, version = (None, None) if lazy else (tuple(form.shape), tensor.version)
    return _Same(tensor.known()), version, tensor.requires_grad, form.dtype, form.device, shape


def _state(tensor: Tensor | None) -> tuple[object, ...]:
    if tensor is None:
        return (None,)
    if type(tensor) not in (nn.Parameter, Tensor) and is_lazy(tensor):
        return _Same(tensor), None, tensor.requires_grad, tensor.dtype, tensor.device, None
    version = None if tensor.is_inference() else tensor._version
    return _Same(tensor), version, tensor.requires_grad, tensor.dtype, tensor.device, tuple(tensor.shape)


def _shapes(rows: Iterable[tuple[Any, ...]]) -> dict[str, object]:
    """Return the shapes of all tensors by full name."""
    return {f"{row[0]}.{key}" if row[0] else key: shape for row in rows for key, *_, shape in row[3:]}


def _replayed(shapes: dict[str, object], records: Iterable[Record]) -> dict[str, object]:
    """Return the shapes of all tensors by full name after the edits of records."""
    for operation in (operation for record in records for operation in record.operations or ()):
        if isinstance(operation, ModuleAdded):
            shapes.update((f"{operation.name}.{key}", shape) for key, shape in operation.shapes)
        elif isinstance(operation, ModuleRemoved):
            for row in operation.row.tensors:
                shapes.pop(row.name, None)
        elif isinstance(operation, TensorRemoved):
            shapes.pop(operation.row.name, None)
    return shapes


def _nothing() -> None:
    """Stand for a weak reference to what is gone."""


class _Same:
    """A weak reference that equals another one exactly where both refer to the same living object."""

    __slots__ = ("_reference",)

    def __init__(self, item: object) -> None:
        self._reference = _nothing if item is None else weakref.ref(item)

    def __eq__(self, other: object) -> bool:
        item = self._reference()
        return item is not None and isinstance(other, _Same) and other._reference() is item

    __hash__ = None  # type: ignore[assignment]  # Python's own way to say that it has none


def make_record(
    transformation: Transformation,
    result: GraphModule,
    frame: Frame,
    before: State,
    marked_before: Collection[str],
    *,
    seconds: float,
    run: int,
    index: int | None,
) -> Record:
    """Return the record of a run that is over."""
    signature = signature_or_empty(transformation)
    changed = bool(frame.operations) or result is not frame.graph_module or not before.is_that_of(result)
    rewrites = frame.rewrites
    if not rewrites and frame.operations is None and signature:
        rewrites = _marked_rewrites(result, frame, signature, before.names(), marked_before)
    return Record(
        pass_name=transformation.name,
        transformation=class_path(type(transformation)),
        options=_recorded_options(transformation),
        signature=signature,
        rewrites=tuple(rewrites),
        refusals=tuple(frame.refusals),
        seconds=seconds,
        run=run,
        index=index,
        reversible=isinstance(transformation, ReversibleTransformation),
        changed=changed and transformation._edits,
        operations=None if frame.operations is None else tuple(frame.operations),
        derived=tuple(frame.derived),
        rekeyed=changed and frame.operations is None and before.is_rekeyed(result),
    )


def _marked_rewrites(
    result: GraphModule, frame: Frame, signature: str, names: Collection[str], marked_before: Collection[str]
) -> list[Rewrite]:
    """Return one rewrite for each node that a pass marked in this run."""
    return [
        Rewrite(site=node.name, before=(node.name,) if node.name in names else (), after=(node.name,))
        for node in iter_nodes(result.graph)
        if has_mark(node, signature) and (node in frame.marked or node.name not in marked_before)
    ]


def own_records(graph_module: GraphModule, transformation: Transformation) -> list[Record]:
    """Return the records that an equal pass made and that are not undone, oldest first."""
    signature = signature_or_empty(transformation)
    path, options = class_path(type(transformation)), _recorded_options(transformation)
    return [
        record
        for record in ledger_of(graph_module).records
        if record.state == "applied" and record.signature == signature
        # Passes without a signature are told apart by what a record shows of their options.
        if signature or (record.transformation, record.options) == (path, options)
    ]


def _recorded_options(transformation: Transformation) -> tuple[tuple[str, object], ...]:
    options = transformation.options.items()
    return tuple((name, value if is_plain_data(value) else repr(value)) for name, value in options)
