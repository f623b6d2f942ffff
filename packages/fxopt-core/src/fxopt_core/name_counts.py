"""How far torch had counted for each name of a graph's nodes, so that an undo can let it count from there again."""

from __future__ import annotations

from torch.fx import Graph


class NameCounts:
    """The counts of a graph at one moment.

    >>> graph = Graph()
    >>> counts = NameCounts(graph)
    >>> [counts.before(graph.placeholder("x").name) for _ in range(2)]
    [('x', None), None]
    """

    def __init__(self, graph: Graph) -> None:
        self._counts: dict[str, int] = dict(graph._graph_namespace._base_count)
        self._told: set[str] = set()

    def before(self, name: str) -> tuple[str, int | None] | None:
        """Return what a new name was counted from and how far that had come; None where that was told already."""
        head, _, number = name.rpartition("_")
        base = head if head and number.isdigit() else name
        if base in self._told:
            return None
        self._told.add(base)
        return base, self._counts.get(base)
