"""`Edits`: the journal that an `Editor` writes, and the visitors that compare and summarise journals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch.fx import GraphModule

from fxopt_core import (
    Journal,
    Memo,
    Record,
)
from fxopt_rewrite.data.codec import pack, restore_journal, stored
from fxopt_rewrite.journal import edits
from fxopt_rewrite.journal.edits import Edit, EditVisitor
from fxopt_rewrite.journal.replay import Live, Tables
from fxopt_rewrite.journal.resolve import refs_of


@stored
@dataclass(frozen=True, slots=True)
class Edits(Journal):
    """The edits of one pass, oldest first."""

    edits: tuple[Edit, ...] = ()

    def __len__(self) -> int:
        return len(self.edits)

    def __reduce__(self) -> tuple[Callable[[bytes, bytes], Journal], tuple[bytes, bytes]]:
        return restore_journal, pack(self)  # as text, so that reading it imports nothing that it names

    def take_back(self, graph_module: GraphModule, pass_name: str, memo: Memo) -> None:
        """Undo the edits, last first; after an `UndoError` the graph module is half undone."""
        # All journals of one undo share the tables, because making them takes time linear in the size of the graph.
        if Tables not in memo:
            memo[Tables] = Tables(graph_module)
        tables = memo[Tables]
        assert isinstance(tables, Tables)
        Live(graph_module, self.edits, pass_name, tables).run()

    def dependent(self, later: Iterable[Journal]) -> Journal | None:
        """Return the first of the later journals that used, replaced or removed what these edits made or need."""
        own: _Footprint | None = None  # mostly there are no later ones
        for journal in later:
            own, other = own or _Footprint(self.edits), _Footprint(edits_of(journal))
            if other.changed & (own.changed | own.needed) or other.needed & own.changed:
                return journal
        return None

    def shapes_after(self, shapes: Mapping[str, object]) -> dict[str, object]:
        """Return the shapes of all tensors by full name after the edits, given those before."""
        after = dict(shapes)
        for edit in self.edits:
            if isinstance(edit, edits.ModuleAdded):
                after.update((f"{edit.name}.{key}", shape) for key, shape in edit.shapes)
            elif isinstance(edit, edits.ModuleRemoved | edits.TensorRemoved):
                for row in edit.row.tensors if isinstance(edit, edits.ModuleRemoved) else (edit.row,):
                    after.pop(row.name, None)
        return after


def edits_of(source: Record | Journal | None) -> tuple[Edit, ...]:
    """Return the edits of a record or of a journal, oldest first."""
    journal = source.journal if isinstance(source, Record) else source
    return journal.edits if isinstance(journal, Edits) else ()


class _Footprint(EditVisitor):
    """What edits changed and need: nodes by number, modules and tensors by name, and places.

    A place, named by its predecessor, is where undoing restores something: two edits that emptied the same place have
    to be undone in order.
    """

    def __init__(self, steps: Iterable[Edit]) -> None:
        self.changed: set[object] = set()  # made, removed, or emptied
        self.needed: set[object] = set()
        for edit in steps:
            edit.accept(self)

    def node_added(self, edit: edits.NodeAdded) -> None:
        self.changed.add(edit.row.id)
        self.needed.update(refs_of(edit.row))

    def node_removed(self, edit: edits.NodeRemoved) -> None:
        self.changed.update((edit.row.id, (edits.NodeRow, edit.row.previous)))
        self.needed.update((*refs_of(edit.row), edit.row.previous))

    def node_replaced(self, edit: edits.NodeReplaced) -> None:
        self.needed.update((edit.old, edit.new, *(user for user, _ in edit.places or ())))

    def module_added(self, edit: edits.ModuleAdded) -> None:
        self.changed.update((edit.name, *(f"{edit.name}.{key}" for key, _ in edit.shapes)))

    def module_removed(self, edit: edits.ModuleRemoved) -> None:
        self._removed(edit.row)
        self.needed.add(edit.row.twin)
        for row in edit.row.tensors:
            self._refer_to(row.piece)

    def tensor_removed(self, edit: edits.TensorRemoved) -> None:
        self._removed(edit.row)
        self._refer_to(edit.row.piece)

    def _removed(self, row: edits.ModuleRow | edits.TensorRow) -> None:
        is_parameter = isinstance(row, edits.TensorRow) and row.is_parameter
        parent = row.name.rpartition(".")[0]
        self.changed.update((row.name, (type(row), is_parameter, parent, row.previous)))
        self.needed.add(f"{parent}.{row.previous}" if parent else row.previous)

    def neutral(self, edit: edits.Neutral) -> None:
        self._refer_to(edit.piece)

    def custom(self, edit: edits.CustomEdit) -> None:
        self.needed.update(edit.concerns)
        # Under a key of its own: a later pass that merely reads what the edit concerns does not depend on it.
        self.changed.update((edits.CustomEdit, name) for name in edit.concerns)

    def _refer_to(self, piece: edits.Piece | None) -> None:
        if piece is not None:
            self.needed.update((piece.key, piece.key.rpartition(".")[0]))
