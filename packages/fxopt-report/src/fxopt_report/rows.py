"""The row of each node in a picture. Both graphs share their rows, so that equal nodes are side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

WIDEST_ROW = 12


def rows_of(order: Sequence[str], edges: Iterable[tuple[str, str]], tensors: frozenset[str]) -> dict[str, int] | None:
    """Return rows in which every node is below everything that it reads; None if the edges have a cycle.

    A node is placed as high as possible. A row has at most a dozen nodes, so that the many users of one value fill
    several rows. Parameters are placed right above the first node that reads them.

    Args:
        order: the nodes; their order decides ties.
        edges: pairs of a node that is read and one that reads it.
        tensors: the nodes that read nothing and are not inputs.

    >>> rows_of(["x", "w", "a", "b"], [("x", "a"), ("a", "b"), ("w", "b")], frozenset({"w"}))
    {'x': 0, 'a': 1, 'b': 2, 'w': 1}
    """
    inputs: dict[str, list[str]] = {name: [] for name in order}
    users: dict[str, list[str]] = {name: [] for name in order}
    for one, other in edges:
        inputs[other].append(one)
        users[one].append(other)
    rows: dict[str, int] = {}
    taken: Counter[int] = Counter()
    free: dict[int, int] = {}
    waiting = {name: len(inputs[name]) for name in order}
    ready = [name for name in reversed(order) if not waiting[name]]
    seen = 0
    while ready:
        name = ready.pop()
        seen += 1
        if name not in tensors:
            above = max((rows.get(each, 0) for each in inputs[name]), default=-1)
            rows[name] = _free_row(above + 1, taken, free)
        for user in users[name]:
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    if seen < len(order):
        return None
    for name in tensors:
        rows[name] = max(0, min((rows[user] for user in users[name]), default=1) - 1)
    return {name: rows[name] for name in (*(n for n in order if n not in tensors), *(n for n in order if n in tensors))}


def _free_row(wanted: int, taken: Counter[int], free: dict[int, int]) -> int:
    """Take a place in the first row with room, from a row on; return that row."""
    row = wanted
    path = []
    while row in free:
        path.append(row)
        row = free[row]
    free.update(dict.fromkeys(path, row))
    taken[row] += 1
    if taken[row] == WIDEST_ROW:
        free[row] = row + 1
    return row


def shared_rows(
    order: Sequence[str],
    edges: Sequence[tuple[str, str]],
    tensors: frozenset[str],
    graphs: Sequence[Mapping[str, object]],
) -> list[dict[str, int]]:
    """Return the rows of each graph: from both graphs together, or from each alone if together they have a cycle."""
    together = rows_of(order, edges, tensors)
    if together is not None:
        return [{name: together[name] for name in graph} for graph in graphs]
    found = []
    for graph in graphs:
        inside = [edge for edge in edges if edge[0] in graph and edge[1] in graph]
        names = [name for name in order if name in graph]
        found.append(rows_of(names, inside, tensors & graph.keys()) or {name: i for i, name in enumerate(names)})
    return found
