"""Recorded operations with other numbers for nodes: after an undo out of order, what a later pass read is another node.

A later pass has read a node that an earlier one put in. When the earlier one is undone first, the original node is
read again, and the record of the later one has to say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from fxopt_core.ledger_rows import (
    NodeAdded,
    NodeRemoved,
    NodeReplaced,
    NodeRow,
    Operation,
    Ref,
    UsersOrdered,
)
from fxopt_core.recalling import mapped

T = TypeVar("T", int, "int | None")


def stand_ins(operations: Iterable[Operation]) -> dict[int, int]:
    """Return for each node that a pass put in place of another one the number of that one.

    >>> stand_ins((NodeReplaced(1, 2), NodeReplaced(2, 3)))
    {2: 1, 3: 1}
    """
    found: dict[int, int] = {}
    for operation in operations:
        if isinstance(operation, NodeReplaced):
            found[operation.new] = found.get(operation.old, operation.old)
    return found


def renumbered(operations: Iterable[Operation], numbers: Mapping[int, int]) -> tuple[Operation, ...]:
    """Return operations with the numbers that nodes have now.

    >>> renumbered((UsersOrdered(1, (2, 3)),), {2: 7})
    (UsersOrdered(node=1, users=(7, 3)),)
    """

    def now(number: int) -> int:
        return numbers.get(number, number)

    return tuple(_renumbered(operation, now) for operation in operations)


def _renumbered(operation: Operation, now: Callable[[int], int]) -> Operation:
    if isinstance(operation, (NodeAdded, NodeRemoved)):
        return replace(operation, row=_row(operation.row, now))
    if isinstance(operation, UsersOrdered):
        return UsersOrdered(now(operation.node), tuple(map(now, operation.users)))
    if isinstance(operation, NodeReplaced):
        places = operation.places
        moved = None if places is None else tuple((now(user), numbers) for user, numbers in places)
        return NodeReplaced(now(operation.old), now(operation.new), moved)
    return operation


def _row(row: NodeRow, now: Callable[[int], int]) -> NodeRow:
    args, kwargs = mapped((row.args, row.kwargs), lambda ref: Ref(now(ref.id)))
    return replace(row, args=args, kwargs=kwargs, previous=None if row.previous is None else now(row.previous))
