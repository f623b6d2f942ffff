"""Instruments see every reversal, of one pass and of a composition, and what passes call."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from operator_swaps import Swap
from site_passes import Called, Retarget
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import (
    Instrument,
    PassRun,
    Record,
    ReversibleTransformation,
    compose,
    history,
    instrumented,
    undo,
)


class Both(ReversibleTransformation):
    """A pass that calls others inside of itself."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return Retarget()(Swap()(graph_module))

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        return Swap()(Retarget()(graph_module, reverse=True), reverse=True)


def traced() -> GraphModule:
    return symbolic_trace(Called(lambda x: torch.relu(x) + torch.sin(x)))


PASSES = compose(Retarget(), Swap(), compose(Retarget("sin", "cos"), Swap()))  # the last one finds nothing to do
BACK = [("retarget", 2), ("swap", 1), ("retarget", 0)]  # in the order in which undo takes them back


class Watch(Instrument):
    """Writes down all that it is told."""

    def __init__(self) -> None:
        self.runs: list[PassRun] = []
        self.records: list[Record] = []

    def before_pass(self, run: PassRun, graph_module: GraphModule) -> None:
        self.runs.append(run)

    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> bool | None:
        self.records.append(record)
        return None


class Vetoes(Instrument):
    def __init__(self, index: int | None) -> None:
        self.index = index

    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> bool | None:
        return run.index != self.index


def test_undo_of_a_pass_that_called_others() -> None:
    graph_module = Both()(traced())
    watch = Watch()
    with instrumented(watch):
        undo(graph_module)
    assert graph_module.code == traced().code
    assert [run.name for run in watch.runs] == ["retarget", "swap"]  # which its `reverse` calls


class TestReversingAComposition:
    def runs(self, *instruments: Instrument) -> tuple[GraphModule, Watch]:
        graph_module = PASSES(traced())
        watch = Watch()
        with instrumented(watch, *instruments):
            PASSES(graph_module, reverse=True)
        return graph_module, watch

    def test_is_a_run_of_each_pass_in_reverse(self) -> None:
        graph_module, watch = self.runs()
        assert [(run.name, run.index) for run in watch.runs] == [("swap", 3), *BACK]
        assert [len(record.rewrites) for record in watch.records] == [1, 1, 0, 1]  # equal passes are undone together
        assert {record.state for record in watch.records} == {"undone"}
        assert graph_module.code == traced().code
        names = [[parent.name for parent in parents(run)] for run in watch.runs]
        assert names == [["compose", "compose"], ["compose", "compose"], ["compose"], ["compose"]]

    def test_a_veto_leaves_that_pass_applied_and_goes_on(self) -> None:
        graph_module, _ = self.runs(Vetoes(2))
        assert [record.state for record in history(graph_module)] == ["undone", "undone", "applied", "undone"]
        assert " cos" in graph_module.code.replace("torch.", " ")
        assert undo(graph_module).code == traced().code

    def test_to_skip_one_is_to_leave_it_applied(self) -> None:
        class SkipsTheSecond(Instrument):
            def should_run(self, run: PassRun, graph_module: GraphModule) -> bool:
                return run.index != 2

        graph_module, watch = self.runs(SkipsTheSecond())
        assert [run.index for run in watch.runs] == [3, 1, 0]
        assert history(graph_module)[2].state == "applied"


def parents(run: PassRun) -> Iterable[PassRun]:
    while run.parent is not None:
        run = run.parent
        yield run
