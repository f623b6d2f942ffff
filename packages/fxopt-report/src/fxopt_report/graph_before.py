"""The graph before passes, from the ledger: what they put in is taken out again, and what they took out comes back.

No tensor is touched: passes that cannot be undone are no exception, and only names are copied.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.fx import GraphModule

from fxopt_core import FxoptError, Record, Transformation, known_class, ledger_of
from fxopt_report.drawn import Draft, DrawnGraph, Modules, Slot, drafts_of, drawn
from fxopt_report.node_text import text_of
from fxopt_rewrite import (
    EditVisitor,
    KeyOrder,
    ModuleRemoved,
    ModuleRow,
    NodeAdded,
    NodeRemoved,
    NodeReplaced,
    NodeRow,
    TensorRow,
    Unresolved,
    edits_of,
    ignored,
    mapped,
    module_of,
)


def graph_before(graph_module: GraphModule) -> tuple[DrawnGraph | None, tuple[str, ...]]:
    """Return the graph before the passes that are applied, and notes on what the ledger does not say.

    Where a pass edited the graph by itself, or something else changed it since, this is the graph after that; None
    where that is the graph as it is now.
    """
    records = [record for record in ledger_of(graph_module).records if record.state == "applied" and record.changed]
    former = _FormerGraph(graph_module)
    for place in reversed(range(len(records))):
        try:
            former.take_back(records[place])
        except _UnknownError as error:
            later = records[place + 1 :]
            note = (
                f"The graph before `{records[place].pass_name}` is not known: {error}. "
                f"{'Shown is the graph after it' if later else 'Only the graph after it is shown'}; "
                "give the original graph module to see it."
            )
            return (_taken_back(graph_module, later) if later else None), (note,)
    return former.drawn(), ()


def _taken_back(graph_module: GraphModule, records: list[Record]) -> DrawnGraph:
    former = _FormerGraph(graph_module)
    for record in reversed(records):
        former.take_back(record)
    return former.drawn()


class _UnknownError(FxoptError):
    """The ledger does not say what was there before."""


class _FormerGraph(EditVisitor):
    """The nodes of a graph, on which records are taken back, the latest first."""

    def __init__(self, graph_module: GraphModule) -> None:
        drafts = drafts_of(graph_module)
        self._modules = Modules(graph_module)
        self._order: KeyOrder[Draft, None] = KeyOrder(dict.fromkeys(drafts))
        self._by_number: dict[int, list[Draft]] = {}
        self._readers: dict[Draft, list[Slot]] = {draft: [] for draft in drafts}
        for draft in drafts:
            self._note(draft)

    def drawn(self) -> DrawnGraph:
        """Return what the graph is by now."""
        return drawn(self._order, self._modules)

    def take_back(self, record: Record) -> None:
        """Take the edits of a record back.

        Raises:
            _UnknownError: It has none, or the graph was changed since.
        """
        if record.journal is None:
            cls = known_class(record.transformation)
            if cls is not None and issubclass(cls, Transformation) and cls.replaces_code_generator:
                return  # it left the graph as it was
            raise _UnknownError("the pass edited the graph by itself, and no record says how")
        for edit in reversed(edits_of(record)):
            edit.accept(self)

    def module_removed(self, edit: ModuleRemoved) -> None:
        """Know the module again."""
        self._modules.add(edit.row.name, _description(edit.row))

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

    def node_added(self, edit: NodeAdded) -> None:
        """Take the node out."""
        row = edit.row
        draft = self._draft(row.id, row.name)
        if self._current_readers(draft):
            raise _UnknownError(f"node `{draft.name}` is read by something that was not there")
        self._order.remove(draft)
        self._by_number[row.id].remove(draft)
        for slot in draft.reads:
            slot.read = draft  # it reads nothing any more
        draft.reads.clear()
        draft.arguments = (), {}

    def node_removed(self, edit: NodeRemoved) -> None:
        """Put the node in."""
        row = edit.row
        draft = Draft(row.name, row.op, row.target, meta=row.meta, number=row.id)
        draft.arguments = mapped((row.args, dict(row.kwargs)), lambda ref: draft.slot(self._draft(ref.id)), _Named)
        self._order.insert_after(self._place(row, draft), draft, None)
        self._note(draft)

    def _place(self, row: NodeRow, draft: Draft) -> Draft | None:
        """Return the node after which a node was, or one that will do as well; None for the beginning."""
        found = [] if row.previous is None else self._by_number.get(row.previous, [])
        if found:
            return found[0]
        inputs = {slot.read for slot in draft.reads}
        last = None
        for each in self._order if inputs else ():
            last = each if each in inputs else last
        return last

    def node_replaced(self, edit: NodeReplaced) -> None:
        """Let users read the old node again."""
        old, new = self._draft(edit.old), self._draft(edit.new)
        moved = []
        if edit.places is None:
            moved = self._current_readers(new)
        else:
            for number, places in edit.places:
                for user in self._by_number.get(number, []):
                    moved += [slot for place, slot in enumerate(user.reads) if place in places]
        for slot in moved:
            slot.read = old
        self._readers[old] += moved
        self._readers[new] = self._current_readers(new)

    users_ordered = module_added = tensor_removed = neutral = custom = ignored

    def unknown(self, found: str) -> _UnknownError:
        """Return the error for an edit that it has no method for."""
        return _UnknownError(found)

    def _current_readers(self, draft: Draft) -> list[Slot]:
        return [slot for slot in self._readers[draft] if slot.read is draft]


class _Named:
    """A function or class of which only the name is known."""

    def __init__(self, value: Unresolved) -> None:
        self._value = value

    def __repr__(self) -> str:
        return self._value.name.replace(":", ".")


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
    return module_of(row, getattr(sys.modules[module], name), _on_meta)


def _on_meta(row: TensorRow) -> nn.Parameter | None:
    absent = row.dtype is None and not row.shape
    return None if absent else nn.Parameter(torch.empty(row.shape, device="meta"), requires_grad=False)
