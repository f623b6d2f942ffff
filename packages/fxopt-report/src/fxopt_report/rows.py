"""The row of each node in a picture. Both graphs share their rows, so that equal nodes are side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

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
    for one, other in edges:
        inputs[other].append(one)
    try:
        ready = [*TopologicalSorter(inputs).static_order()]
    except CycleError:
        return None
    rows: dict[str, int] = {}
    taken: Counter[int] = Counter()
    free: dict[int, int] = {}  # the row with room below one that was full
    for name in ready:
        if name in tensors:
            continue
        # Tensors have no row yet: the 0 leaves room for them above.
        highest = 1 + max((rows.get(each, 0) for each in inputs[name]), default=-1)
        # From the row that was filled last: all users of one value would start at the same full rows otherwise.
        row = free.get(highest, highest)
        while taken[row] == WIDEST_ROW:
            row += 1
        free[highest] = rows[name] = row
        taken[row] += 1
    for name in ready:
        for each in inputs[name]:
            if each in tensors:
                rows[each] = min(rows.get(each, rows[name]), rows[name] - 1)
    return {name: rows.get(name, 0) for name in sorted(order, key=tensors.__contains__)}


def shared_rows(
    order: Sequence[str],
    edges: Sequence[tuple[str, str]],
    tensors: frozenset[str],
    graphs: Sequence[Mapping[str, object]],
) -> list[dict[str, int]]:
    """Return the rows of each graph: from both graphs together, or from each alone if together they have a cycle."""
    together = rows_of(order, edges, tensors)
    found = []
    for graph in graphs:
        inside = [edge for edge in edges if edge[0] in graph and edge[1] in graph]
        names = [name for name in order if name in graph]
        rows = together or rows_of(names, inside, tensors & graph.keys()) or {name: i for i, name in enumerate(names)}
        found.append({name: row for name, row in rows.items() if name in graph})
    return found
