"""`key_map`: the ledger of a graph module, read backwards for the original keys, and forwards for what they became."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy

from fxopt_core.checks import check_graph_module
from fxopt_core.errors import CheckpointError
from fxopt_core.garbage import collector_paused
from fxopt_core.graph import iter_nodes
from fxopt_core.key_map import Assembly, Derivation, KeyMap, NewTensor, OriginalTensor, Part, Step
from fxopt_core.key_tree import Entry, ModuleTree, TracedDerivation, TracedTensor
from fxopt_core.ledger import Derived, Record, has_ledger, ledger_of
from fxopt_core.ledger_rows import ModuleAdded, ModuleRemoved, Neutral, TensorRemoved, TensorRow
from fxopt_core.marks import tag_of


def key_map(graph_module: GraphModule) -> KeyMap:
    """Return which tensors of the original model became which of a rewritten one.

    All passes count that are applied and not undone, in order.

    Args:
        graph_module: the rewritten module.

    Returns:
        The map. It says nothing of values, and is the same before and after training.

    Raises:
        PreconditionError: It is no graph module.
        CheckpointError: A pass changed keys without recording how, the module was edited by other means since, or its
            ledger was lost.
        FxoptError: A newer version of fxopt wrote the ledger.

    >>> print(key_map(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3)))))
    2 keys are what they were
    """
    check_graph_module(graph_module, "key_map")
    if not has_ledger(graph_module):
        _check_not_rewritten(graph_module)
    records = [record for record in ledger_of(graph_module).records if record.state == "applied" and record.changed]
    for record in records:
        if record.rekeyed:
            raise CheckpointError(
                f"pass `{record.pass_name}` changed names or shapes of parameters or buffers and did not record how, "
                "so that the original keys cannot be told from the present ones. Write it with fxopt_core.Editor, as "
                "docs/writing-passes.md shows, or undo it first"
            )
    with collector_paused():
        tree = ModuleTree(graph_module)
        for record in reversed(records):
            tree.take_back(record)
        return _Tracer(tree.entries()).trace(records)


def _check_not_rewritten(graph_module: GraphModule) -> None:
    for node in iter_nodes(graph_module.graph):
        if tag_of(node).id is not None:
            raise CheckpointError(
                f"node `{node.name}` was rewritten, and this graph module has no ledger that says how, so that the "
                "original keys cannot be told. A graph module that is made of another one's graph starts without; take "
                "it along by `new.meta.update(old.meta)`"
            )


class _Tracer:
    """Follows tensors from the original model on, through one record after the other."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = entries
        self._now: dict[str, TracedTensor] = {}
        for entry in entries:
            if entry.tensor is not None:
                entry.tensor.name = entry.tensor.name or entry.key
                self._now[entry.key] = entry.tensor
        self._made: list[TracedTensor] = []

    def trace(self, records: Iterable[Record]) -> KeyMap:
        """Return the map."""
        for record in records:
            self._follow(record)
        for name, tensor in self._now.items():
            tensor.key = name
        groups = self._groups()
        labels = self._labels(groups)
        steps = tuple(_step(item, labels) for item in _in_order(self._made))
        return KeyMap(tuple(self._original(e, labels) for e in self._entries), steps, _ties(groups))

    def _follow(self, record: Record) -> None:
        made: dict[str, deque[TracedTensor]] = {}
        gone: dict[str, deque[TracedTensor]] = {}
        latest: list[TracedTensor] = []
        for operation in record.operations or ():
            if isinstance(operation, ModuleAdded):
                latest = self._add(operation, record.pass_name)
                for tensor in latest:
                    made.setdefault(tensor.name, deque()).append(tensor)
            elif isinstance(operation, ModuleRemoved):
                for row in operation.row.tensors:
                    self._take_out(row, latest, gone)
            elif isinstance(operation, TensorRemoved):
                self._take_out(operation.row, latest, gone)
            elif isinstance(operation, Neutral):
                self._now[operation.piece.key].fills.append(operation)
        for derived in record.derived:
            self._derive(derived, record, made, gone)

    def _add(self, operation: ModuleAdded, pass_name: str) -> list[TracedTensor]:
        dtypes = operation.dtypes or (None,) * len(operation.shapes)
        made = []
        for (key, shape), dtype in zip(operation.shapes, dtypes, strict=True):
            if shape is not None:
                name = f"{operation.name}.{key}"
                self._now[name] = tensor = TracedTensor(name, shape, dtype, pass_name)
                made.append(tensor)
        self._made += made
        return made

    def _take_out(self, row: TensorRow, latest: list[TracedTensor], gone: dict[str, deque[TracedTensor]]) -> None:
        tensor = self._now.pop(row.name, None)
        if tensor is None:
            return
        tensor.dtype, tensor.shape = row.dtype, row.shape
        if row.piece is not None:
            self._now[row.piece.key].parts.append((tensor, row.piece))
        else:
            tensor.beside = latest[0] if latest else None
            gone.setdefault(row.name, deque()).append(tensor)

    def _derive(
        self,
        derived: Derived,
        record: Record,
        made: dict[str, deque[TracedTensor]],
        gone: dict[str, deque[TracedTensor]],
    ) -> None:
        inputs = [None if name is None else _next(gone, name) or self._now.get(name) for _, name in derived.inputs]
        outputs = [None if name is None else _next(made, name) for name in derived.outputs]
        named = [name for _, name in derived.inputs]
        for name, tensor in (*zip(named, inputs, strict=True), *zip(derived.outputs, outputs, strict=True)):
            if name is not None and tensor is None:
                raise CheckpointError(
                    f"pass `{record.pass_name}` recorded that `{derived.function}` computes tensors with `{name}`, and "
                    "it neither took that out nor put it in; its call of Editor.derived has to name both as they are"
                )
        item = TracedDerivation(derived, inputs, outputs, record.pass_name)
        for output in outputs:
            if output is not None:
                output.derivation = item
        for each in inputs:
            if each is not None:
                each.beside = None

    def _groups(self) -> dict[object, list[Entry]]:
        """Return the entries by what tells whether they are one tensor."""
        ends: dict[int, object] = {}
        for target in self._made:
            for source, piece in target.parts:
                ends.setdefault(id(source), (id(target), piece))
        groups: dict[object, list[Entry]] = {}
        for entry in self._entries:
            if entry.tensor is not None:
                live = entry.tensor.live
                token = ends.get(id(entry.tensor), id(entry.tensor)) if live is None else identity(live)
                groups.setdefault(token, []).append(entry)
        return groups

    def _labels(self, groups: Mapping[object, list[Entry]]) -> dict[int, str]:
        """Return for each tensor, by id, what the steps call it."""
        labels = {id(e.tensor): entries[0].key for entries in groups.values() for e in entries}
        used = dict.fromkeys((entry.key for entry in self._entries), 1)
        for tensor in self._made:
            label = tensor.name
            while label in used:
                used[tensor.name] += 1
                label = f"{tensor.name}#{used[tensor.name]}"
            used[label] = 1
            labels[id(tensor)] = label
        return labels

    def _original(self, entry: Entry, labels: Mapping[int, str]) -> OriginalTensor:
        tensor = entry.tensor
        if tensor is None:
            return OriginalTensor(entry.key, None, None, entry.kind, entry.persistent)
        kept = self._now.get(entry.key) is tensor
        beside = None if tensor.beside is None else labels[id(tensor.beside)]
        return OriginalTensor(entry.key, tensor.shape, tensor.dtype, entry.kind, entry.persistent, kept, beside)


def _next(found: Mapping[str, deque[TracedTensor]], name: str) -> TracedTensor | None:
    return found[name].popleft() if found.get(name) else None


def identity(tensor: Tensor) -> object:
    """Return what two tensors have in common exactly if they are one: tied, or the same view of the same memory."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or is_lazy(tensor):
        return id(tensor)
    place = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return (*place, tensor.dtype, tuple(tensor.shape), tensor.stride())


def _ties(groups: Mapping[object, list[Entry]]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of several keys."""
    return tuple(tuple(entry.key for entry in group) for group in groups.values() if len(group) > 1)


def _in_order(made: Iterable[TracedTensor]) -> Iterator[TracedTensor | TracedDerivation]:
    """Yield tensors that are assembled and derivations, each behind all that it reads."""
    done: set[int] = set()
    for tensor in made:
        waiting: list[TracedTensor | TracedDerivation] = [tensor.derivation or tensor]
        while waiting:
            item = waiting[-1]
            reads = item.inputs if isinstance(item, TracedDerivation) else [source for source, _ in item.parts]
            before = [each.derivation or each for each in reads if each is not None and each.pass_name is not None]
            before = [each for each in before if id(each) not in done]
            if before and id(item) not in done:
                waiting += before
                continue
            waiting.pop()
            if id(item) not in done:
                done.add(id(item))
                if isinstance(item, TracedDerivation) or item.parts or item.fills:
                    yield item


def _step(item: TracedTensor | TracedDerivation, labels: Mapping[int, str]) -> Step:
    if isinstance(item, TracedTensor):
        target = _new(item, labels)
        parts = [Part(labels[id(source)], replace(piece, key=target.label)) for source, piece in item.parts]
        fills = [Neutral(replace(fill.piece, key=target.label), fill.value) for fill in item.fills]
        return Assembly(target, tuple(dict.fromkeys(parts)), tuple(fills), item.pass_name or "")
    names = [name for name, _ in item.derived.inputs]
    sources = [None if tensor is None else labels[id(tensor)] for tensor in item.inputs]
    return Derivation(
        function=item.derived.function,
        inputs=tuple(zip(names, sources, strict=True)),
        settings=item.derived.settings,
        outputs=tuple(None if tensor is None else _new(tensor, labels) for tensor in item.outputs),
        restore=item.derived.restore,
        pass_name=item.pass_name,
    )


def _new(tensor: TracedTensor, labels: Mapping[int, str]) -> NewTensor:
    return NewTensor(labels[id(tensor)], tensor.key, tensor.shape or (), tensor.dtype)
