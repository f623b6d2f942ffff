"""The places of the nodes of a graph, and the paths of edges between them.

Rows are given. The order within each row, in which few edges cross, comes from igraph (Sugiyama's method). igraph takes
all nodes to be equally wide, so distances are set here: in least squares, each row is as close as possible to the nodes
that it is joined with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

ROW_HEIGHT = 66
NODE_HEIGHT = 40
#: How many rows an edge may cross; longer edges are not drawn, but labelled at their ends.
FURTHEST = 16
_BETWEEN = 22.0
_SETTLING = 16
_BEND_WIDTH = 6.0


@dataclass(frozen=True)
class Layout:
    """The places of all nodes and edges.

    Attributes:
        places: x and y of the centre of each node.
        paths: the points of each edge that is drawn, its ends included.
        far: the edges that are not drawn because their ends are far apart.
        width: the width of the whole.
        height: its height.
    """

    places: Mapping[str, tuple[float, float]]
    paths: Mapping[tuple[str, str], tuple[tuple[float, float], ...]]
    far: tuple[tuple[str, str], ...]
    width: float
    height: float


def lay_out(rows: Mapping[str, int], edges: Iterable[tuple[str, str]], widths: Mapping[str, float]) -> Layout:
    """Lay out a graph.

    Args:
        rows: the row of each node; rows between may be empty.
        edges: pairs of a node and one in a later row.
        widths: the width of each node.

    >>> layout = lay_out({"a": 0, "b": 1}, [("a", "b")], {"a": 80.0, "b": 80.0})
    >>> layout.places
    {'a': (40.0, 20.0), 'b': (40.0, 86.0)}
    """
    # Nodes are numbers, and so are the bends of edges that cross rows, which come after the nodes.
    numbers = {name: number for number, name in enumerate(rows)}
    levels, sizes = list(rows.values()), [widths[name] for name in rows]
    chains: dict[tuple[str, str], list[int]] = {}
    far = []
    for one, other in edges:
        # Edges run upwards only if both graphs together have a cycle, and rows are in plain order.
        if not 0 < rows[other] - rows[one] <= FURTHEST:
            far.append((one, other))
            continue
        crossed = range(rows[one] + 1, rows[other])
        chains[one, other] = [numbers[one], *range(len(levels), len(levels) + len(crossed)), numbers[other]]
        levels += crossed
        sizes += [_BEND_WIDTH] * len(crossed)
    xs = _settled(levels, sizes, [link for chain in chains.values() for link in pairwise(chain)], len(rows))
    left = min((x - size / 2 for x, size in zip(xs, sizes, strict=True)), default=0.0)
    right = max((x + size / 2 for x, size in zip(xs, sizes, strict=True)), default=0.0)
    centres = [(x - left, level * ROW_HEIGHT + NODE_HEIGHT / 2) for x, level in zip(xs, levels, strict=True)]
    places = {name: centres[number] for name, number in numbers.items()}
    paths = {edge: _path([centres[number] for number in chain]) for edge, chain in chains.items()}
    height = max(rows.values(), default=0) * ROW_HEIGHT + NODE_HEIGHT
    return Layout(places, paths, tuple(far), right - left, height)


def _path(centres: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return the points of an edge: from the lower side of a node to the upper side of another, straight in rows."""
    half = NODE_HEIGHT / 2
    return tuple((x, y + side) for x, y in centres for side in (-half, half))[1:-1]


def _settled(
    levels: Sequence[int], sizes: Sequence[float], links: Sequence[tuple[int, int]], bends_from: int
) -> list[float]:
    """Return the x of all centres, with room between those in one row."""
    layers: list[list[int]] = [[] for _ in range(max(levels, default=-1) + 1)]
    beside: list[tuple[list[int], list[int]]] = [([], []) for _ in levels]
    for number, level in enumerate(levels):
        layers[level].append(number)
    for one, other in links:
        beside[one][1].append(other)
        beside[other][0].append(one)
    if links:
        import igraph  # only where something is drawn

        graph = igraph.Graph(n=len(levels), edges=links, directed=True)
        coordinates = graph.layout_sugiyama(layers=list(levels), maxiter=50).coords
        for layer in layers:
            layer.sort(key=lambda number: coordinates[number][0])
    xs = [0.0] * len(levels)
    gaps = [
        [
            (sizes[one] + sizes[other]) / 2 + _BETWEEN / (2 if min(one, other) >= bends_from else 1)
            for one, other in pairwise(layer)
        ]
        for layer in layers
    ]
    for sweep in range(_SETTLING):
        # The first half of the sweeps follows the row above or below, the second half both.
        down, last = sweep % 2 == 0, sweep >= _SETTLING // 2
        for row in range(len(layers)) if down else reversed(range(len(layers))):
            wanted = []
            for number in layers[row]:
                above, below = beside[number]
                near = above + below if last else above if down else below
                wanted.append(sum(xs[each] for each in near) / len(near) if near else xs[number])
            for number, x in zip(layers[row], _spread(wanted, gaps[row]), strict=True):
                xs[number] = x
    return xs


def _spread(wanted: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """Return positions as close as possible to the wanted ones, at least these gaps apart: isotonic regression."""
    offsets = list(accumulate(gaps, initial=0.0))[: len(wanted)]
    blocks: list[tuple[float, int]] = []  # the sum of what is wanted, and how many want it
    for want, offset in zip(wanted, offsets, strict=True):
        # Without the gaps before it, a position only has to be no smaller than the former one.
        total, count = want - offset, 1
        # While the last block has a larger mean than the new one, both become one block.
        while blocks and blocks[-1][0] * count > total * blocks[-1][1]:
            former, more = blocks.pop()
            total, count = total + former, count + more
        blocks.append((total, count))
    means = [total / count for total, count in blocks for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]
