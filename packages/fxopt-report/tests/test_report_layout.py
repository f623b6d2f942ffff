"""Where nodes stand: below what they read, side by side in both graphs, without overlaps, in linear time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from fxopt_report.places import FURTHEST, NODE_HEIGHT, Layout, lay_out
from fxopt_report.rows import WIDEST_ROW, rows_of, shared_rows

Edges = list[tuple[str, str]]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[str], Edges, dict[str, float]]:
    """Graphs without cycles, with widths."""
    count = draw(st.integers(1, 30))
    names = [f"n{i}" for i in range(count)]
    pairs = draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=60))
    edges = list(dict.fromkeys((names[min(pair)], names[max(pair)]) for pair in pairs if pair[0] != pair[1]))
    widths = {name: float(draw(st.integers(20, 240))) for name in names}
    return names, edges, widths


def check(laid: Layout, rows: dict[str, int], edges: Edges, widths: dict[str, float]) -> None:
    """Check all that a layout promises."""
    assert laid.places.keys() == rows.keys()
    assert {*laid.paths, *laid.far} == set(edges)
    by_row: dict[float, list[tuple[float, float]]] = {}
    for name, (x, y) in laid.places.items():
        by_row.setdefault(y, []).append((x, widths[name]))
        assert x - widths[name] / 2 >= -1e-6
        assert x + widths[name] / 2 <= laid.width + 1e-6
        assert y + NODE_HEIGHT / 2 <= laid.height
    for row in by_row.values():
        for (x, width), (beside, wide) in pairwise(sorted(row)):
            assert beside - x >= (width + wide) / 2 - 1e-6, "two nodes overlap"
    for (one, other), path in laid.paths.items():
        assert path[0][0] == pytest.approx(laid.places[one][0])
        assert path[-1][0] == pytest.approx(laid.places[other][0])
        assert [y for _, y in path] == sorted(y for _, y in path), "an edge runs upwards"
        assert rows[other] - rows[one] <= FURTHEST


@given(graph=graphs())
@settings(max_examples=40)
def test_every_node_stands_below_what_it_reads(graph: tuple[list[str], Edges, dict[str, float]]) -> None:
    names, edges, _ = graph
    read = {other for _, other in edges}
    tensors = frozenset(name for i, name in enumerate(names) if name not in read and i % 2)
    rows = rows_of(names, edges, tensors)
    assert rows is not None
    assert rows.keys() == set(names)
    assert all(rows[one] < rows[other] for one, other in edges)
    assert max(Counter(row for name, row in rows.items() if name not in tensors).values(), default=0) <= WIDEST_ROW


@given(graph=graphs())
@settings(max_examples=40)
def test_layouts_have_no_overlaps(graph: tuple[list[str], Edges, dict[str, float]]) -> None:
    names, edges, widths = graph
    rows = rows_of(names, edges, frozenset())
    assert rows is not None
    check(lay_out(rows, edges, widths), rows, edges, widths)


@given(graph=graphs(), steps=st.lists(st.integers(1, FURTHEST + 2), min_size=30, max_size=30))
@settings(max_examples=40)
def test_rows_may_be_empty(graph: tuple[list[str], Edges, dict[str, float]], steps: list[int]) -> None:
    """As they are in one of two graphs that share their rows, with edges that cross them and are not drawn."""
    names, edges, widths = graph
    close = rows_of(names, edges, frozenset())
    assert close is not None
    rows = {name: sum(steps[: row + 1]) for name, row in close.items()}
    check(lay_out(rows, edges, widths), rows, edges, widths)


def test_a_chain_is_straight() -> None:
    names = [f"n{i}" for i in range(40)]
    rows = {name: i for i, name in enumerate(names)}
    laid = lay_out(rows, list(pairwise(names)), {name: 60.0 + i for i, name in enumerate(names)})
    assert max(x for x, _ in laid.places.values()) - min(x for x, _ in laid.places.values()) < 1


def test_crossings_are_undone() -> None:
    """Two chains whose nodes are given in alternating order do not cross."""
    names = [f"{side}{i}" for i in range(6) for side in ("ab" if i % 2 else "ba")]
    edges = [(f"{side}{i}", f"{side}{i + 1}") for side in "ab" for i in range(5)]
    rows = {name: int(name[1]) for name in names}
    laid = lay_out(rows, edges, dict.fromkeys(names, 50.0))
    assert len({laid.places[f"a{i}"][0] < laid.places[f"b{i}"][0] for i in range(6)}) == 1


def test_long_edges_are_told_and_not_drawn() -> None:
    names = [f"n{i}" for i in range(FURTHEST + 3)]
    rows = {name: i for i, name in enumerate(names)}
    laid = lay_out(rows, [*pairwise(names), (names[0], names[-1])], dict.fromkeys(names, 50.0))
    assert laid.far == ((names[0], names[-1]),)


def test_graphs_that_contradict_each_other_have_rows_of_their_own() -> None:
    order, before, after = ["a", "b"], [("a", "b")], [("b", "a")]
    assert rows_of(order, [*before, *after], frozenset()) is None
    one, other = shared_rows(order, [*before, *after], frozenset(), [{"a": 0, "b": 0}, {"b": 0}])
    assert other == {"b": 0}
    assert one.keys() == {"a", "b"}


@pytest.mark.parametrize("hub", [False, True])
def test_work_is_linear_in_nodes(hub: bool, steps_of: Callable[[Callable[[], object]], int]) -> None:
    """Also where thousands of nodes read one value; igraph's own work is not counted."""

    def steps(count: int) -> int:
        names = [f"n{i}" for i in range(count)]
        edges = [(names[0], name) for name in names[1:]] if hub else list(pairwise(names))
        rows = rows_of(names, edges, frozenset())
        assert rows is not None
        return steps_of(lambda: lay_out(rows, edges, dict.fromkeys(names, 80.0))) + steps_of(
            lambda: rows_of(names, edges, frozenset())
        )

    assert steps(800) < 10 * steps(100)
