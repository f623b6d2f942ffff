"""The graph before passes, from the ledger: what they put in is taken out again, and what they took out comes back.

No tensor is touched, so that this works for passes that cannot be undone, too, and costs a copy of names alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from fxopt.reporting.drawn import Draft, DrawnGraph, Modules, add_slot, drafts_of, drawn
from fxopt_core import Record
from fxopt_core.ledger import ledger_of
from fxopt_core.ledger_rows import (
    Listed,
    ModuleRemoved,
    ModuleRow,
    NodeAdded,
    NodeRemoved,
    NodeReplaced,
    NodeRow,
    Unresolved,
)
from fxopt_core.recalling import mapped
from fxopt_tools.rendering import text_of


def graph_before(graph_module: GraphModule) -> tuple[DrawnGraph | None, tuple[str, ...]]:
    """Return the graph before the passes that are applied, as far as the ledger tells, and what it does not tell.

    Where a pass edited the graph by itself, or something else changed it since, this is the graph behind that; None
    where that is the graph as it is now.
    """
    records = [record for record in ledger_of(graph_module).records if record.state == "applied" and record.changed]
    rewinding = _Rewinding(graph_module)
    for place in reversed(range(len(records))):
        try:
            rewinding.take_back(records[place])
        except _UnknownError as error:
            later = records[place + 1 :]
            note = (
                f"The graph before `{records[place].pass_name}` is not known: {error}. "
                f"{'Shown is the graph after it' if later else 'Only the graph after it is shown'}; "
                "give the original graph module to see it."
            )
            return (_taken_back(graph_module, later) if later else None), (note,)
    return rewinding.result(), ()


def _taken_back(graph_module: GraphModule, records: list[Record]) -> DrawnGraph:
    rewinding = _Rewinding(graph_module)
    for record in reversed(records):
        rewinding.take_back(record)
    return rewinding.result()


class _UnknownError(Exception):
    """The ledger does not tell what was there before."""


class _Rewinding:
    """The nodes of a graph on their way back."""

    def __init__(self, graph_module: GraphModule) -> None:
        drafts = drafts_of(graph_module)
        self._modules = Modules(graph_module)
        self._order: dict[Draft | None, Draft | None] = dict(zip([None, *drafts], [*drafts, None], strict=True))
        self._previous: dict[Draft, Draft | None] = dict(zip(drafts, [None, *drafts], strict=False))
        self._by_number: dict[int, list[Draft]] = {}
        self._readers: dict[Draft, list[Any]] = {draft: [] for draft in drafts}
        for draft in drafts:
            self._note(draft)

    def result(self) -> DrawnGraph:
        """Return the graph as it is now."""
        return drawn(self._in_order(), self._modules)

    def take_back(self, record: Record) -> None:
        """Take back what a record says.

        Raises:
            _UnknownError: It does not say it, or the graph is another one since.
        """
        if record.operations is None:
            raise _UnknownError("the pass edited the graph by itself, and no record says how")
        for operation in reversed(record.operations):
            if isinstance(operation, NodeAdded):
                self._take_out(operation.row)
            elif isinstance(operation, NodeRemoved):
                self._put_in(operation.row)
            elif isinstance(operation, NodeReplaced):
                self._point_back(operation)
            elif isinstance(operation, ModuleRemoved):
                self._modules.add(operation.row.name, _description(operation.row))

    def _in_order(self) -> Iterable[Draft]:
        draft = self._order[None]
        while draft is not None:
            yield draft
            draft = self._order[draft]

    def _note(self, draft: Draft) -> None:
        if draft.number is not None:
            self._by_number.setdefault(draft.number, []).append(draft)
        self._readers.setdefault(draft, [])
        for slot in draft.reads:
            self._readers[slot.read].append(slot)

    def _draft(self, number: int, name: str = "") -> Draft:
        found = self._by_number.get(number, [])
        named = [draft for draft in found if draft.name == name] or found
        if len(named) != 1:
            raise _UnknownError(f"node {name or number!r} that it refers to was taken out or copied since")
        return named[0]

    def _take_out(self, row: NodeRow) -> None:
        draft = self._draft(row.id, row.name)
        if self._current_readers(draft):
            raise _UnknownError(f"node `{draft.name}` is read by something that was not there")
        before, after = self._previous.pop(draft), self._order.pop(draft)
        self._order[before] = after
        if after is not None:
            self._previous[after] = before
        self._by_number[row.id].remove(draft)
        for slot in draft.reads:
            slot.read = draft  # it reads nothing any more
        draft.reads.clear()
        draft.arguments = (), {}

    def _put_in(self, row: NodeRow) -> None:
        draft = Draft(row.name, row.op, row.target, meta=row.meta, number=row.id)
        arguments = mapped(
            (row.args, dict(row.kwargs)), lambda ref: add_slot(draft, self._draft(ref.id)), lambda name: _Named(name)
        )
        draft.arguments = arguments
        before = self._place(row, draft)
        after = self._order[before]
        self._order[before], self._order[draft], self._previous[draft] = draft, after, before
        if after is not None:
            self._previous[after] = draft
        self._note(draft)

    def _place(self, row: NodeRow, draft: Draft) -> Draft | None:
        """Return the node behind which a node stood, or a place as good; None for the beginning."""
        found = [] if row.previous is None else self._by_number.get(row.previous, [])
        if found:
            return found[0]
        inputs = {slot.read for slot in draft.reads}
        if not inputs:
            return None
        last = None
        for each in self._in_order():
            last = each if each in inputs else last
        return last

    def _point_back(self, operation: NodeReplaced) -> None:
        old, new = self._draft(operation.old), self._draft(operation.new)
        moved = []
        if operation.places is None:
            moved = self._current_readers(new)
        else:
            for number, places in operation.places:
                for user in self._by_number.get(number, []):
                    moved += [slot for place, slot in enumerate(user.reads) if place in places]
        for slot in moved:
            slot.read = old
        self._readers[old] += moved
        self._readers[new] = self._current_readers(new)

    def _current_readers(self, draft: Draft) -> list[Any]:
        return [slot for slot in self._readers[draft] if slot.read is draft]


class _Named:
    """A function or class that is known by its name alone."""

    def __init__(self, value: Unresolved) -> None:
        self._name = value.name

    def __repr__(self) -> str:
        return self._name.replace(":", ".")


def _description(row: ModuleRow) -> str:
    """Return class and settings of a module that was taken out, from what is kept of it."""
    name = row.cls.rpartition(":")[2].rpartition(".")[2]
    try:
        return f"{name}({_like(row).extra_repr()})"
    except Exception:  # a class of someone's own, or of another version: its settings will do
        settings = (f"{key}={text_of(value)}" for key, value in row.attributes if isinstance(value, (int, float, str)))
        return f"{name}({', '.join(settings)})"


def _like(row: ModuleRow) -> nn.Module:
    """Return a module of torch's own with the settings of one that was taken out, and no memory for tensors."""
    module, _, name = row.cls.partition(":")
    if not module.startswith("torch.nn.modules."):
        raise ValueError(f"{row.cls} is not torch's own")
    cls: type[nn.Module] = getattr(sys.modules[module], name)
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    for key, value in row.attributes:
        setattr(made, key, list(value.items) if isinstance(value, Listed) else value)
    for tensor in row.tensors:
        absent = tensor.dtype is None and not tensor.shape
        value = None if absent else nn.Parameter(torch.empty(tensor.shape, device="meta"))
        made.register_parameter(tensor.name.rpartition(".")[2], value)
    return made
