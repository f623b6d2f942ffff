"""Passes undone in another order: nodes that a record names, and places, are others then.

A later pass has read a node that an earlier one put in. When the earlier one is undone first, the original node is
read again. And where the later one took something out that stood behind what the earlier one had taken out before, that
stands between them again.

A later pass may also have replaced a node that an earlier one has read. When the earlier one is undone first, what it
brings back reads the replacement, until the later one is undone, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from fxopt_core.ledger_rows import (
    ModuleRemoved,
    ModuleRow,
    NodeAdded,
    NodeRemoved,
    NodeReplaced,
    NodeRow,
    Operation,
    Ref,
    TensorRemoved,
    TensorRow,
    UsersOrdered,
)
from fxopt_core.recalling import mapped

RowT = TypeVar("RowT", ModuleRow, TensorRow)
_Place = tuple[type, str, bool, str | None]


class Renumbering:
    """What came back by undoing passes.

    >>> undone = Renumbering()
    >>> undone.note((NodeReplaced(1, 2), NodeReplaced(2, 3)))
    >>> undone.adapted((UsersOrdered(0, (3, 4)),))
    (UsersOrdered(node=0, users=(1, 4)),)
    """

    def __init__(self) -> None:
        self._stood_for: dict[int, int] = {}
        self._behind_node: dict[int | None, int] = {}
        self._behind: dict[_Place, str] = {}

    def __bool__(self) -> bool:
        return bool(self._stood_for or self._behind_node or self._behind)

    def note(self, operations: Iterable[Operation]) -> None:
        """Take notice of the operations of a pass that was undone."""
        for operation in operations:
            if isinstance(operation, NodeReplaced):
                self._stood_for[operation.new] = self._now(operation.old)
            elif isinstance(operation, NodeRemoved):
                self._behind_node[operation.row.previous] = operation.row.id
            elif isinstance(operation, (ModuleRemoved, TensorRemoved)):
                row = operation.row
                self._behind[_place(row)] = row.name.rpartition(".")[2]

    def adapted(self, operations: Iterable[Operation]) -> tuple[Operation, ...]:
        """Return the operations of a later pass as they are now."""
        return tuple(map(self._adapt, operations))

    def _now(self, number: int) -> int:
        return self._stood_for.get(number, number)

    def _adapt(self, operation: Operation) -> Operation:
        if isinstance(operation, (NodeAdded, NodeRemoved)):
            return replace(operation, row=self._node_row(operation.row))
        if isinstance(operation, ModuleRemoved):
            return ModuleRemoved(self._behind_others(operation.row))
        if isinstance(operation, TensorRemoved):
            return replace(operation, row=self._behind_others(operation.row))
        if isinstance(operation, UsersOrdered):
            return UsersOrdered(self._now(operation.node), tuple(map(self._now, operation.users)))
        if isinstance(operation, NodeReplaced):
            places = operation.places and tuple((self._now(user), numbers) for user, numbers in operation.places)
            return replace(operation, old=self._now(operation.old), new=self._now(operation.new), places=places)
        return operation

    def _node_row(self, row: NodeRow) -> NodeRow:
        args, kwargs = mapped((row.args, row.kwargs), lambda ref: Ref(self._now(ref.id)))
        previous = None if row.previous is None else self._now(row.previous)
        return replace(row, args=args, kwargs=kwargs, previous=self._behind_node.get(previous, previous))

    def _behind_others(self, row: RowT) -> RowT:
        return replace(row, previous=self._behind.get(_place(row), row.previous))


def as_read_now(
    operations: Iterable[Operation], later: Iterable[Operation], is_there: Callable[[int], bool]
) -> tuple[Operation, ...]:
    """Return operations as they are where later ones, not undone, have replaced nodes that theirs read.

    >>> row = NodeRow(7, "call_function", "f", (Ref(1), Ref(2)), (), "f")
    >>> as_read_now((NodeAdded(row),), (NodeReplaced(1, 8), NodeReplaced(8, 9)), {2, 7, 9}.__contains__)[0].row.args
    (Ref(id=9), Ref(id=2))
    """
    stands_for = {each.old: each.new for each in later if isinstance(each, NodeReplaced)}
    if not stands_for:
        return tuple(operations)

    def follow(number: int) -> int:
        now = number
        while now in stands_for and not is_there(now):
            now = stands_for[now]
        return now if is_there(now) else number

    def adapt(operation: Operation) -> Operation:
        if not isinstance(operation, (NodeAdded, NodeRemoved)):
            return operation
        row = operation.row
        args, kwargs = mapped((row.args, row.kwargs), lambda ref: Ref(follow(ref.id)))
        previous = None if row.previous is None else follow(row.previous)
        return replace(operation, row=replace(row, args=args, kwargs=kwargs, previous=previous))

    return tuple(map(adapt, operations))


def _place(row: ModuleRow | TensorRow) -> _Place:
    """Return where something stood among its siblings of the same kind."""
    is_parameter = isinstance(row, TensorRow) and row.is_parameter
    return type(row), row.name.rpartition(".")[0], is_parameter, row.previous
