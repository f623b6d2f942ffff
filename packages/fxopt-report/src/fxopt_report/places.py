"""The places of the nodes of a graph, and the paths of edges between them.

Rows are given. The order within each row, in which few edges cross, comes from igraph (Sugiyama's method). igraph takes
all nodes to be equally wide, so distances are set here: in least squares, each row is as close as possible to the nodes
that it is joined with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

ROW_HEIGHT = 66
NODE_HEIGHT = 40
FURTHEST = 16
"""How many rows an edge may cross; longer edges are not drawn, but labelled at their ends."""
_BETWEEN = 22.0
_SETTLING = 16
_BEND_WIDTH = 6.0
_YIELDING = 0.02
_STRAIGHT = 6.0


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
    grid = _Grid(rows, edges, widths)
    grid.sort()
    positions = grid.positions()
    left = min((x - width / 2 for x, width in zip(positions, grid.widths, strict=True)), default=0.0)
    right = max((x + width / 2 for x, width in zip(positions, grid.widths, strict=True)), default=0.0)
    xs = [x - left for x in positions]
    places = {name: (xs[i], _y(grid.rows[i])) for name, i in grid.numbers.items()}
    paths = {edge: _path(xs, grid, chain) for edge, chain in grid.chains.items()}
    height = (max(rows.values(), default=0)) * ROW_HEIGHT + NODE_HEIGHT
    return Layout(places, paths, tuple(grid.far), right - left, height)


def _y(row: int) -> float:
    return row * ROW_HEIGHT + NODE_HEIGHT / 2


def _path(xs: Sequence[float], grid: _Grid, chain: Sequence[int]) -> tuple[tuple[float, float], ...]:
    first, *bends, last = chain
    half = NODE_HEIGHT / 2
    start, end = (xs[first], _y(grid.rows[first]) + half), (xs[last], _y(grid.rows[last]) - half)
    straight = ((xs[bend], _y(grid.rows[bend]) + side) for bend in bends for side in (-half, half))  # beside nodes
    return start, *straight, end


class _Grid:
    """The nodes, and the bends of edges that cross rows, as numbers in rows."""

    def __init__(self, rows: Mapping[str, int], edges: Iterable[tuple[str, str]], widths: Mapping[str, float]) -> None:
        self.numbers = {name: number for number, name in enumerate(rows)}
        self.rows = list(rows.values())
        self.widths = [widths[name] for name in rows]
        self.nodes = len(rows)
        self.links: list[tuple[int, int]] = []
        self.chains: dict[tuple[str, str], list[int]] = {}
        self.far: list[tuple[str, str]] = []
        self.ends: set[int] = set()
        for one, other in edges:
            span = rows[other] - rows[one]
            if 0 < span <= FURTHEST:
                self.chains[one, other] = self._chain(self.numbers[one], self.numbers[other])
            else:
                self.far.append((one, other))
        self.layers: list[list[int]] = [[] for _ in range(max(self.rows, default=-1) + 1)]
        for number, row in enumerate(self.rows):
            self.layers[row].append(number)

    def _chain(self, one: int, other: int) -> list[int]:
        chain = [one]
        for row in range(self.rows[one] + 1, self.rows[other]):
            chain.append(len(self.rows))
            self.rows.append(row)
            self.widths.append(_BEND_WIDTH)
        chain.append(other)
        self.links += pairwise(chain)
        return chain

    def sort(self) -> None:
        """Order the rows so that few edges cross."""
        if self.links:
            import igraph  # only where something is drawn

            graph = igraph.Graph(n=len(self.rows), edges=self.links, directed=True)
            coordinates = graph.layout_sugiyama(layers=self.rows, maxiter=50).coords
            for layer in self.layers:
                layer.sort(key=lambda number: coordinates[number][0])

    def _neighbours(self) -> tuple[list[list[int]], list[list[int]]]:
        upper: list[list[int]] = [[] for _ in self.rows]
        lower: list[list[int]] = [[] for _ in self.rows]
        for one, other in self.links:
            lower[one].append(other)
            upper[other].append(one)
        return upper, lower

    def positions(self) -> list[float]:
        """Return the x of all centres, with room between those in one row."""
        upper, lower = self._neighbours()
        self.ends = {n for n in range(self.nodes) if not upper[n] and len(lower[n]) == 1}
        lines = self._lines(upper, lower)
        xs = [0.0] * len(self.rows)
        for layer in self.layers:
            self._spread(layer, [0.0] * len(layer), xs)
        for sweep in range(_SETTLING):
            down, last = sweep % 2 == 0, sweep >= _SETTLING // 2
            sides = (upper, lower) if last else ((upper,) if down else (lower,))
            means = _means(lines, xs) if last else {}
            for layer in self.layers if down else reversed(self.layers):
                wanted = [self._wanted(number, sides, xs, means.get(lines[number])) for number in layer]
                self._spread(layer, wanted, xs)
        return xs

    def _lines(self, upper: Sequence[Sequence[int]], lower: Sequence[Sequence[int]]) -> list[int]:
        """Return, for each node, the straight line that it is on: the first node of its chain without branches."""
        lines = list(range(len(self.rows)))
        for number in (number for layer in self.layers for number in layer):
            inputs = [n for n in upper[number] if n not in self.ends]
            if len(inputs) == 1 and len(lower[inputs[0]]) == 1:
                lines[number] = lines[inputs[0]]
        return lines

    def _wanted(
        self, number: int, sides: Sequence[Sequence[Sequence[int]]], xs: Sequence[float], line: float | None
    ) -> float:
        """Return the best x of a node: on its line, and close to its neighbours."""
        total, weight = (0.0, 0.0) if line is None else (_STRAIGHT * line, _STRAIGHT)
        for side in sides:
            for other in side[number]:
                share = _YIELDING if other in self.ends else 1.0
                total, weight = total + share * xs[other], weight + share
        return total / weight if weight else xs[number]

    def _spread(self, layer: Sequence[int], wanted: Sequence[float], xs: list[float]) -> None:
        """Place a row as close as possible to the wanted positions, without overlaps: isotonic regression."""
        offsets = [0.0] if layer else []  # a row is empty where all edges that cross it are too long to be drawn
        for one, other in pairwise(layer):
            bends = one >= self.nodes and other >= self.nodes
            offsets.append(
                offsets[-1] + (self.widths[one] + self.widths[other]) / 2 + (_BETWEEN / 2 if bends else _BETWEEN)
            )
        blocks: list[tuple[float, float, int]] = []  # weighted sum, weight, count
        for number, want, offset in zip(layer, wanted, offsets, strict=True):
            weight = _YIELDING if number in self.ends else 1.0
            block = ((want - offset) * weight, weight, 1)
            while blocks and blocks[-1][0] * block[1] > block[0] * blocks[-1][1]:
                last = blocks.pop()
                block = (last[0] + block[0], last[1] + block[1], last[2] + block[2])
            blocks.append(block)
        place = 0
        for total, weight, count in blocks:
            for _ in range(count):
                xs[layer[place]] = total / weight + offsets[place]
                place += 1


def _means(lines: Sequence[int], xs: Sequence[float]) -> dict[int, float]:
    """Return the mean x of each line with more than one node."""
    places: dict[int, list[float]] = {}
    for line, x in zip(lines, xs, strict=True):
        places.setdefault(line, []).append(x)
    return {line: sum(each) / len(each) for line, each in places.items() if len(each) > 1}
