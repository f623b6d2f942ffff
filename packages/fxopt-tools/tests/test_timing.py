"""`Timing`: as a list and as a tree, for passes in compositions and in passes, and whatever becomes of them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import (
    Instrument,
    LintAndRecompile,
    PassError,
    PassRun,
    PreconditionError,
    Record,
    ReversibleTransformation,
    Transformation,
    compose,
    instrumented,
    undo,
)
from fxopt_core.errors import VetoError
from fxopt_tools.watch.timing import TimedRun, Timing


def traced() -> GraphModule:
    return symbolic_trace(torch.nn.ReLU())


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Named(Transformation):
    """A pass that does nothing, under any name."""

    def __init__(self, called: str) -> None:
        self.called = called

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module

    @property
    def name(self) -> str:
        return self.called


class Sleeps(ReversibleTransformation):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        time.sleep(0.02)
        graph_module.graph.output_node().meta["slept"] = True
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        time.sleep(0.01)
        return graph_module


class Calls(Transformation):
    """A pass that calls others inside of itself."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        time.sleep(0.005)
        return compose(Sleeps(), LintAndRecompile())(graph_module)


class Fails(Transformation):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        raise ValueError("no luck")


class Slow(Instrument):
    """An instrument that takes its time."""

    def before_pass(self, run: PassRun, graph_module: GraphModule) -> None:
        time.sleep(0.01)


class Vetoes(Instrument):
    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> bool:
        return False


class Script:
    """Tells a `Timing` of runs by hand, so that all times are known."""

    def __init__(self, **options: Any) -> None:
        self.clock = Clock()
        self.timing = Timing(clock=self.clock, **options)
        self.module = traced()

    def run(
        self,
        name: str,
        inside: PassRun | None = None,
        *,
        seconds: float = 0.0,
        around: float = 0.0,
        inner: tuple[tuple[str, float, float], ...] = (),
    ) -> PassRun:
        run = PassRun(Named(name), parent=inside)
        self.timing.before_pass(run, self.module)
        for each, its_seconds, its_around in inner:
            self.run(each, run, seconds=its_seconds, around=its_around)
        done = sum(its_seconds + its_around for _, its_seconds, its_around in inner)
        self.clock.now += seconds - done + around
        self.timing.after_pass(run, self.module, Record(name, "m:C", (), "", seconds=seconds))
        return run


def script() -> Script:
    told = Script()
    whole = PassRun(Named("compose"))
    told.run("fold", whole, seconds=1.0, around=0.5)
    told.run("merge", whole, seconds=4.0, around=0.25, inner=(("fold", 1.0, 0.5), ("lint", 0.5, 0.0)))
    told.run("lint", seconds=2.0)
    return told


def test_the_list_sums_by_pass_and_sorts_by_own_time() -> None:
    rows = script().timing.rows()
    assert [(row.name, row.runs, row.seconds, row.own, row.around) for row in rows] == [
        ("lint", 2, 2.5, 2.5, 0.0),
        ("fold", 2, 2.0, 2.0, 1.0),
        ("merge", 1, 4.0, 2.0, 0.25),
    ]
    assert [row.share for row in rows] == pytest.approx([2.5 / 6.5, 2.0 / 6.5, 2.0 / 6.5])
    assert sum(row.share for row in rows) == pytest.approx(1.0)


def test_the_tree_nests() -> None:
    composed, alone = script().timing.tree()
    assert (composed.name, composed.outcome, composed.seconds, composed.around, composed.own) == (
        "compose", None, 5.0, 0.75, 0.0
    )  # fmt: skip
    fold, merge = composed.children
    assert (fold.name, fold.outcome, fold.own, fold.children) == ("fold", "done", 1.0, ())
    assert [child.name for child in merge.children] == ["fold", "lint"]
    assert merge.own == pytest.approx(4.0 - 1.5 - 0.5)  # without the two inside and what was around them
    assert (alone.name, alone.children) == ("lint", ())
    assert script().timing.seconds == pytest.approx(5.75 + 2.0)


def test_the_tables() -> None:
    timing = script().timing
    assert timing.table("list").splitlines() == [
        "5 runs of passes, 7.7500 s",
        "seconds    self  share  around  runs  pass",
        " 2.5000  2.5000  38.5%  0.0000     2  lint",
        " 2.0000  2.0000  30.8%  1.0000     2  fold",
        " 4.0000  2.0000  30.8%  0.2500     1  merge",
    ]
    assert timing.table("tree").splitlines() == [
        "5 runs of passes, 7.7500 s",
        "seconds    self  share  around  runs  pass",
        " 5.0000       -  69.2%  0.7500     4  compose",
        " 1.0000  1.0000  15.4%  0.5000     1    fold",
        " 4.0000  2.0000  53.8%  0.2500     3    merge",
        " 1.0000  1.0000  15.4%  0.5000     1      fold",
        " 0.5000  0.5000   7.7%  0.0000     1      lint",
        " 2.0000  2.0000  30.8%  0.0000     1  lint",
    ]
    assert str(timing) == timing.table("list")
    assert str(Script(display="tree").timing) == str(Timing()) == "0 runs of passes, 0.0000 s"


def test_json_has_all_of_it() -> None:
    data = json.loads(script().timing.to_json())
    assert data["seconds"] == pytest.approx(7.75)
    assert [(row["name"], row["runs"], row["self"]) for row in data["passes"]] == [
        ("lint", 2, 2.5), ("fold", 2, 2.0), ("merge", 1, 2.0)
    ]  # fmt: skip
    merge = data["tree"][0]["children"][1]
    assert set(merge) == {"name", "index", "reverse", "outcome", "seconds", "around", "self", "children"}
    assert [child["name"] for child in merge["children"]] == ["fold", "lint"]


def test_a_display_that_does_not_exist_is_refused() -> None:
    with pytest.raises(PreconditionError, match="display is 'pie', expected 'list' or 'tree'"):
        Timing(display="pie")  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(PreconditionError, match="display is 'pie'"):
        Timing().table("pie")  # type: ignore[arg-type]  # the mistake under test


def test_clear_forgets() -> None:
    told = script()
    told.timing.clear()
    assert told.timing.rows() == () and told.timing.tree() == () and told.timing.seconds == 0


# --- With core


def test_compositions_and_passes_in_passes_nest() -> None:
    timing = Timing()
    with instrumented(timing):
        compose(LintAndRecompile(), compose(Calls(), LintAndRecompile()))(traced())
        LintAndRecompile()(traced())
    assert [(depth, run.name, run.index) for root in timing.tree() for depth, run in root.walk()] == [
        (0, "compose", None),
        (1, "lint-and-recompile", 0),
        (1, "compose", None),
        (2, "calls", 1),
        (3, "compose", None),
        (4, "sleeps", 0),
        (4, "lint-and-recompile", 1),
        (2, "lint-and-recompile", 2),
        (0, "lint-and-recompile", None),
    ]
    (calls,) = (run for _, run in timing.tree()[0].walk() if run.name == "calls")
    (inner,) = calls.children
    sleeps = inner.children[0]
    assert sleeps.seconds >= 0.019 and calls.seconds >= sleeps.seconds + 0.004
    assert 0.004 < calls.own < calls.seconds - sleeps.seconds
    assert timing.rows()[0].name == "sleeps"


def test_the_time_of_other_instruments_is_around() -> None:
    timing = Timing()
    with instrumented(timing, Slow()):
        Sleeps()(traced())
    (run,) = timing.tree()
    assert run.seconds >= 0.019 and run.around >= 0.009
    timing = Timing()
    with instrumented(Slow(), timing):
        LintAndRecompile()(traced())
    assert timing.tree()[0].around < 0.009


def test_reversals_are_told_apart() -> None:
    timing = Timing()
    passes = compose(Sleeps(), LintAndRecompile())
    with instrumented(timing):
        graph_module = passes(traced())
        passes(graph_module, reverse=True)
    labels = [run.label for root in timing.tree() for _, run in root.walk()]
    assert labels == ["compose", "sleeps", "lint-and-recompile", "undoing compose", "undoing lint-and-recompile",
                      "undoing sleeps"]  # fmt: skip
    assert {(row.name, row.reverse) for row in timing.rows()} == {
        ("sleeps", False), ("sleeps", True), ("lint-and-recompile", False), ("lint-and-recompile", True)
    }  # fmt: skip


class Renames(Sleeps):
    """A pass that changes something, so that there is something to undo."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph_module.graph.output_node().name = "result"
        return graph_module


def test_undo_is_seen() -> None:
    graph_module = Renames()(traced())
    timing = Timing()
    with instrumented(timing):
        undo(graph_module)
    assert [run.label for root in timing.tree() for _, run in root.walk()] == ["undo", "undoing renames"]
    assert timing.tree()[0].children[0].seconds >= 0.009


def outcomes(timing: Timing) -> list[tuple[str, str | None]]:
    return [(run.name, run.outcome) for root in timing.tree() for _, run in root.walk()]


def test_failures_and_vetoes_are_measured_too() -> None:
    timing = Timing()
    with instrumented(timing):
        with pytest.raises(PassError):
            compose(LintAndRecompile(), Fails())(traced())
        with instrumented(Vetoes()):
            Sleeps()(traced())
    assert outcomes(timing) == [
        ("compose", None), ("lint-and-recompile", "done"), ("fails", "failed"), ("sleeps", "vetoed")
    ]  # fmt: skip
    assert timing.tree()[1].seconds >= 0.019
    assert "fails (failed)" in timing.table("tree") and "sleeps (vetoed)" in timing.table("tree")


def test_a_veto_that_is_an_error_is_one() -> None:
    graph_module = Renames()(traced())
    timing = Timing()
    with pytest.raises(VetoError), instrumented(timing, Vetoes()):
        undo(graph_module)
    assert outcomes(timing) == [("undo", None), ("renames", "vetoed")]


def test_one_that_is_not_over_is_running() -> None:
    told = Script()
    told.timing.before_pass(PassRun(Named("slow")), told.module)
    assert outcomes(told.timing) == [("slow", "running")] and "slow (running)" in told.timing.table("tree")


def test_many_runs_do_not_confuse_it() -> None:
    """Ids of runs that are over are given out anew."""
    timing = Timing()
    module = traced()
    with instrumented(timing):
        for _ in range(200):
            compose(LintAndRecompile(), LintAndRecompile())(module)
    assert len(timing.tree()) == 200 and all(len(root.children) == 2 for root in timing.tree())


def test_own_time_is_never_negative() -> None:
    child = TimedRun("b", None, False, "done", 3.0, 0.0)
    assert TimedRun("a", None, False, "done", 2.0, 0.0, (child,)).own == 0
