"""Nodes from which no output follows: passes rewrite them, others take them out, and undo leaves them out then."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch.fx import Node

from fxopt_core.graph import iter_nodes as iter_nodes
from fxopt_core.ledger import NodeAdded, NodeRemoved, NodeReplaced, NodeRow, Operation, Ref
from fxopt_core.recalling import mapped


def dead_nodes(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes from which no output follows, whatever else they do.

    >>> import torch
    >>> graph = torch.fx.symbolic_trace(lambda x: (x + 1, (x * 2).relu())[0]).graph
    >>> sorted(node.name for node in dead_nodes(iter_nodes(graph)))
    ['mul', 'relu']
    """
    waiting = [node for node in nodes if not node.users and node.op not in ("output", "placeholder")]
    found, living = set(waiting), dict[Node, int]()  # and how many users of a node may still be alive
    while waiting:
        for value in waiting.pop()._input_nodes:
            living[value] = living.get(value, len(value.users)) - 1
            if not living[value] and value.op != "placeholder":
                found.add(value)
                waiting.append(value)
    return found


@dataclass(frozen=True)
class LeftOut:
    """What undoing does not bring back, and does not look for, because dead code was taken out since.

    Attributes:
        old: numbers of nodes that a pass took out and that stay out.
        new: numbers of nodes that it made and that are gone.
        behind: for each of ``old``, the number of the node behind which it stood.
    """

    old: set[int] = field(default_factory=set)
    new: set[int] = field(default_factory=set)
    behind: dict[int, int | None] = field(default_factory=dict)

    def previous(self, number: int | None) -> int | None:
        """Return the first node before this one, itself included, that is not left out."""
        while number in self.behind:
            number = self.behind[number]
        return number


def left_out(operations: Iterable[Operation], is_there: Callable[[int], bool]) -> LeftOut:
    """Return what is to be left out when operations are undone.

    Of what the pass made, that is what is gone and was read by nothing but dead code; of what it took out, what that
    stands for, and what nothing else reads.

    Args:
        operations: those of a record.
        is_there: whether a node with this number is in the graph.
    """
    result = LeftOut()
    operations = tuple(operations)
    if not any(isinstance(operation, NodeReplaced) and operation.dead for operation in operations):
        return result
    stood_for: dict[int, list[NodeReplaced]] = {}
    for operation in operations:
        if isinstance(operation, NodeReplaced):
            stood_for.setdefault(operation.new, []).append(operation)
    readers: dict[int, list[int]] = {}
    for operation in reversed(operations):  # readers come after what they read
        if isinstance(operation, NodeAdded):
            number = operation.row.id
            dead = all(each.dead for each in stood_for.get(number, ()))
            if dead and not is_there(number) and result.new.issuperset(readers.get(number, ())):
                result.new.add(number)
            _note(readers, operation.row)
    replaced = {each.old: new for new, several in stood_for.items() for each in several}
    readers = {}
    for operation in operations:  # what is taken out is taken out after its readers
        if isinstance(operation, NodeRemoved):
            row, number = operation.row, operation.row.id
            own = readers.get(number, ())
            if replaced[number] in result.new if number in replaced else own and result.old.issuperset(own):
                result.old.add(number)
                result.behind[number] = row.previous
            _note(readers, row)
    return result


def _note(readers: dict[int, list[int]], row: NodeRow) -> None:
    """Add a row to the readers of all that it reads."""

    def note(ref: Ref) -> Ref:
        readers.setdefault(ref.id, []).append(row.id)
        return ref

    mapped((row.args, row.kwargs), note)
