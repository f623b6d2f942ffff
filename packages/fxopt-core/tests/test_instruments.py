from __future__ import annotations

from typing import Any

import pytest
import torch
from operator_swaps import Swap
from test_compose import traced
from torch.fx import GraphModule

from fxopt_core import (
    Instrument,
    PassError,
    PassRun,
    Record,
    Transformation,
    VerificationError,
    compose,
    history,
    instrumented,
    iter_nodes,
    undo,
)


class Fails(Transformation):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        raise ValueError("no luck")


class Writes(Transformation):
    def transform(self, graph_module: Any) -> Any:
        with torch.no_grad():
            graph_module.linear.weight.mul_(2)
        return graph_module


class Log(Instrument):
    """Writes down what it is told."""

    def __init__(self, name: str, log: list[str], *, vetoes: str = "", skips: str = "") -> None:
        self.name, self.log, self.vetoes, self.skips = name, log, vetoes, skips
        self.runs: list[PassRun] = []

    def should_run(self, run: PassRun, graph_module: GraphModule) -> bool:
        return run.name != self.skips

    def before_pass(self, run: PassRun, graph_module: GraphModule) -> None:
        self.log.append(f"{self.name} before {run.name}")
        self.runs.append(run)

    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> bool | None:
        self.log.append(f"{self.name} after {run.name}")
        return False if run.name == self.vetoes else None

    def after_pass_failed(self, run: PassRun, graph_module: GraphModule, error: BaseException) -> None:
        self.log.append(f"{self.name} failed {run.name}: {type(error).__name__}")


class TestScope:
    def test_last_in_first_out_and_over_after_the_block(self) -> None:
        log: list[str] = []
        with instrumented(Log("a", log), Log("b", log)), instrumented(Log("c", log)):
            Swap()(traced())
        assert log == [
            "a before swap",
            "b before swap",
            "c before swap",
            "c after swap",
            "b after swap",
            "a after swap",
        ]
        Swap()(traced())
        assert len(log) == 6


class TestWhatTheySee:
    def test_names_and_places(self) -> None:
        log = Log("a", [])
        passes = compose(Swap(), compose(Swap("mul", "sub"), compose()), Swap("sub", "truediv"))
        with instrumented(log):
            passes(traced())
        found = [(run.name, run.index, run.reverse) for run in log.runs]
        assert found == [("swap", 0, False), ("swap", 1, False), ("swap", 2, False)]

    def test_the_record_of_the_pass(self) -> None:
        seen: list[Record] = []

        class Watch(Instrument):
            def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> None:
                seen.append(record)
                assert history(graph_module)[-1:] != (record,)

        with instrumented(Watch()):
            graph_module = Swap()(traced())
        assert tuple(seen) == history(graph_module)
        assert len(seen[0].rewrites) == 1


class TestSkipping:
    def test_a_pass_leaves_everything_else_in_place(self) -> None:
        log: list[str] = []
        watch = Log("a", log)
        with instrumented(watch, Log("b", [], skips="fails")):
            graph_module = compose(Swap(), Fails(), Swap("mul", "sub"))(traced())
        assert " - " in graph_module.code
        assert [record.index for record in history(graph_module)] == [0, 2]
        assert [run.index for run in watch.runs] == [0, 2]


class TestFailures:
    def test_are_told_in_place_of_the_result(self) -> None:
        log: list[str] = []
        expected = r"pass `fails` \(pass 1 of the composition\) failed, and it was rolled back: ValueError"
        with pytest.raises(PassError, match=expected), instrumented(Log("a", log), Log("b", log)):
            compose(Swap(), Fails())(traced())
        assert log[4:] == [
            "a before fails",
            "b before fails",
            "b failed fails: ValueError",
            "a failed fails: ValueError",
        ]

    def test_of_an_instrument_are_told_to_those_that_were_entered(self) -> None:
        class Breaks(Instrument):
            def before_pass(self, run: PassRun, graph_module: GraphModule) -> None:
                raise RuntimeError("broken instrument")

        log: list[str] = []
        graph_module = traced()
        code = graph_module.code
        with pytest.raises(PassError, match="broken instrument"), instrumented(Log("a", log), Breaks(), Log("b", log)):
            Swap()(graph_module)
        assert log == ["a before swap", "a failed swap: RuntimeError"]
        assert graph_module.code == code

    def test_raised_after_the_pass_roll_back_the_whole_run(self) -> None:
        class Gate(Instrument):
            def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> None:
                if run.index == 1:
                    raise VerificationError("off by one")

        log: list[str] = []
        graph_module = traced()
        code = graph_module.code
        with pytest.raises(VerificationError) as caught, instrumented(Log("a", log), Gate(), Log("b", log)):
            compose(Swap(), Swap("mul", "sub"))(graph_module)
        assert (caught.value.pass_name, caught.value.index) == ("swap", 1)
        assert log[-2:] == ["b after swap", "a failed swap: VerificationError"]
        assert (graph_module.code, history(graph_module)) == (code, ())


class TestVetoes:
    def test_take_back_one_pass_of_a_composition(self) -> None:
        log: list[str] = []
        graph_module = traced()
        with instrumented(Log("a", log), Log("b", log, vetoes="swap"), Log("c", log)):
            Swap()(graph_module)
        assert log[3:] == ["c after swap", "b after swap", "a failed swap: VetoError"]
        assert " + " in graph_module.code
        (record,) = history(graph_module)
        assert (record.state, len(record.rewrites), record.journal) == ("vetoed", 1, None)
        assert not Swap().get_transformed_nodes(graph_module)
        undo(graph_module)

    def test_the_others_go_on(self) -> None:
        class Second(Instrument):
            def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> bool:
                return run.index != 1

        graph_module = traced()
        code = graph_module.code
        with instrumented(Second()):
            compose(Swap(), compose(Swap("mul", "sub"), Swap("mul", "truediv")))(graph_module, expect=2)
        assert " / " in graph_module.code
        assert [record.state for record in history(graph_module)] == ["applied", "vetoed", "applied"]
        assert undo(graph_module).code == code

    def test_a_new_graph_module_is_given_up_for_the_old_one(self) -> None:
        class Anew(Transformation):
            def transform(self, graph_module: GraphModule) -> GraphModule:
                Swap().transform(graph_module)
                return GraphModule(graph_module, graph_module.graph)

        graph_module = traced()
        with instrumented(Log("a", [], vetoes="anew")):
            assert Anew()(graph_module) is graph_module
        assert " + " in graph_module.code

    def test_that_cannot_bring_values_back_are_errors(self) -> None:
        expected = r"vetoed by Log\. The pass wrote values in place.*linear\.weight"
        with pytest.raises(PassError, match=expected), instrumented(Log("a", [], vetoes="writes")):
            Writes()(traced())

    def test_bring_protected_values_back(self) -> None:
        graph_module: Any = traced()
        before = graph_module.linear.weight.detach().clone()
        with instrumented(Log("a", [], vetoes="writes")):
            compose(Swap(), Writes())(graph_module, protect_values=True)
        assert torch.equal(graph_module.linear.weight, before)
        assert [record.state for record in history(graph_module)] == ["applied", "vetoed"]


class RunsAnywhere:
    """An instrument that derives from nothing and runs the module where it pleases."""

    runs_module = True

    def __init__(self, *where: str, accept: bool | None = None) -> None:
        self.where, self.accept = where, accept
        self.seen: list[tuple[str, float]] = []

    def _see(self, where: str, run: PassRun, graph_module: GraphModule) -> None:
        if where in self.where:
            self.seen.append((f"{where} {run.name}", float(graph_module(torch.full((1, 3), 3.0)).detach().sum())))

    def should_run(self, run: PassRun, graph_module: GraphModule) -> bool:
        self._see("should", run, graph_module)
        return True

    def before_pass(self, run: PassRun, graph_module: GraphModule) -> None:
        self._see("before", run, graph_module)

    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> bool | None:
        self._see("after", run, graph_module)
        return self.accept

    def after_pass_failed(self, run: PassRun, graph_module: GraphModule, error: BaseException) -> None:
        pass


class TestRunningTheModuleAnywhere:
    PASSES = compose(Swap(), Swap("mul", "sub"))

    def test_shows_what_the_graph_says(self) -> None:
        values = []
        graph_module = traced()
        for step in (None, Swap(), Swap("mul", "sub")):
            graph_module = step(graph_module) if step else graph_module
            values.append(float(graph_module(torch.full((1, 3), 3.0)).detach().sum()))
        instrument = RunsAnywhere("should", "before", "after")
        graph_module = traced()
        with instrumented(instrument):
            self.PASSES(graph_module)
        assert [value for _, value in instrument.seen] == [*[values[0]] * 2, *[values[1]] * 3, values[2]]

    @pytest.mark.parametrize("where", ["should", "before", "after"])
    @pytest.mark.parametrize("lint_and_recompile", [True, False])
    def test_leaves_the_code_right(self, where: str, lint_and_recompile: bool) -> None:
        expected = self.PASSES(traced())
        graph_module = traced()
        with instrumented(RunsAnywhere(where)):
            self.PASSES(graph_module, lint_and_recompile=lint_and_recompile)
        assert graph_module.code == expected.code

    def test_before_a_veto_or_an_error_goes_back_to_the_code_before(self) -> None:
        graph_module = traced()
        code, value = graph_module.code, torch.full((1, 3), 3.0)
        expected = graph_module(value)
        with instrumented(RunsAnywhere("before", "after", accept=False)):
            self.PASSES(graph_module)
        assert torch.equal(graph_module(value), expected) and graph_module.code == code
        with pytest.raises(PassError), instrumented(RunsAnywhere("before", "after")):
            compose(Swap(), Fails())(graph_module)
        assert torch.equal(graph_module(value), expected) and graph_module.code == code

    def test_a_broken_graph_is_found_before_it_runs(self) -> None:
        class Broken(Transformation):
            def transform(self, graph_module: GraphModule) -> GraphModule:
                nodes = list(iter_nodes(graph_module.graph))
                nodes[1].args = (nodes[2],)
                return graph_module

        with pytest.raises(PassError, match="`broken` left a broken graph"), instrumented(RunsAnywhere("after")):
            Broken()(traced())
