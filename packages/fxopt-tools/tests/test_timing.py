"""`Timing`: for passes in compositions and in passes, and whatever becomes of them."""

from __future__ import annotations

import time

import pytest
import torch
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import (
    Instrument,
    LintAndRecompile,
    PassError,
    PassRun,
    Record,
    ReversibleTransformation,
    Transformation,
    compose,
    instrumented,
    undo,
)
from fxopt_tools.watch.timing import Timing


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


class Vetoes(Instrument):
    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> bool:
        return False


class Script:
    """Tells a `Timing` of runs by hand, so that all times are known."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.timing = Timing(clock=self.clock)
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


def test_the_table() -> None:
    assert str(script().timing).splitlines() == [
        "5 runs of passes, 7.7500 s",
        "seconds    self  share  around  pass",
        " 5.0000       -  69.2%  0.7500  compose",
        " 1.0000  1.0000  15.4%  0.5000    fold",
        " 4.0000  2.0000  53.8%  0.2500    merge",
        " 1.0000  1.0000  15.4%  0.5000      fold",
        " 0.5000  0.5000   7.7%  0.0000      lint",
        " 2.0000  2.0000  30.8%  0.0000  lint",
    ]
    assert str(Timing()) == "0 runs of passes, 0.0000 s"
    assert script().timing._repr_html_() == f"<pre>{script().timing}</pre>"


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


def test_reversals_are_told_apart() -> None:
    timing = Timing()
    passes = compose(Sleeps(), LintAndRecompile())
    with instrumented(timing):
        graph_module = passes(traced())
        passes(graph_module, reverse=True)
    labels = [run.label for root in timing.tree() for _, run in root.walk()]
    assert labels == ["compose", "sleeps", "lint-and-recompile", "undoing compose", "undoing lint-and-recompile",
                      "undoing sleeps"]  # fmt: skip


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
    assert "fails (failed)" in str(timing) and "sleeps (vetoed)" in str(timing)
