"""Dead code: a pass may rewrite it, another pass may remove it afterwards, and undo then leaves it out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from fxopt_core import inputs_of
from fxopt_rewrite.journal.edits import Edit, NodeAdded, NodeRemoved, NodeReplaced, NodeRow, of_kind
from fxopt_rewrite.journal.resolve import refs_of


def dead_nodes(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes on which no output depends, even if they have side effects.

    >>> import torch
    >>> from fxopt_core import iter_nodes
    >>> graph = torch.fx.symbolic_trace(lambda x: (x + 1, (x * 2).relu())[0]).graph
    >>> sorted(node.name for node in dead_nodes(iter_nodes(graph)))
    ['mul', 'relu']
    """
    waiting = [node for node in nodes if not node.users and node.op not in ("output", "placeholder")]
    found, living = set(waiting), dict[Node, int]()  # with how many users of each node may be alive
    while waiting:
        for value in inputs_of(waiting.pop()):
            living[value] = living.get(value, len(value.users)) - 1
            if not living[value] and value.op != "placeholder":
                found.add(value)
                waiting.append(value)
    return found


@dataclass(frozen=True)
class LeftOut:
    """Nodes, by number, that undoing neither restores nor looks for, because dead code has been removed since."""

    old: set[int] = field(default_factory=set)  # removed by the pass, not to be restored
    new: set[int] = field(default_factory=set)  # added by the pass, gone since
    before: dict[int, int | None] = field(default_factory=dict)  # for each of ``old``, the node before it

    def previous(self, number: int | None) -> int | None:
        """Return the number of the last node, this one included, that is not left out."""
        while number in self.before:
            number = self.before[number]
        return number


def left_out(edits: Sequence[Edit], is_there: Callable[[int], bool]) -> LeftOut:
    """Return what to leave out when edits are undone; ``is_there`` says whether a numbered node is in the graph.

    Left out are the nodes that the pass added, that are gone and were read only by dead code; and of the nodes that it
    removed, those that the former replaced, and those that only such nodes read.
    """
    result = LeftOut()
    replacements = of_kind(edits, NodeReplaced)
    if not any(edit.dead for edit in replacements):
        return result
    replaced = {each.old: each.new for each in replacements}
    needed = {each.new for each in replacements if not each.dead}
    readers: dict[int, list[int]] = {}
    for row in (edit.row for edit in reversed(of_kind(edits, NodeAdded))):  # readers come after what they read
        gone = row.id not in needed and not is_there(row.id)
        if gone and result.new.issuperset(readers.get(row.id, ())):
            result.new.add(row.id)
        _note(readers, row)
    readers = {}
    for row in (edit.row for edit in of_kind(edits, NodeRemoved)):  # readers were removed before what they read
        own = readers.get(row.id, ())
        if replaced[row.id] in result.new if row.id in replaced else own and result.old.issuperset(own):
            result.old.add(row.id)
            result.before[row.id] = row.previous
        _note(readers, row)
    return result


def _note(readers: dict[int, list[int]], row: NodeRow) -> None:
    for number in refs_of(row):
        readers.setdefault(number, []).append(row.id)
