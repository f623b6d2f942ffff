from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from operator_swaps import Swap
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace
from traced_blocks import state

from fxopt_core import (
    FxoptError,
    PassError,
    PostconditionError,
    PreconditionError,
    Refusal,
    ReversibleTransformation,
    Transformation,
    VerificationError,
    compose,
    editing_run,
    history,
    iter_nodes,
    undo,
)

Body = Callable[[GraphModule], object]


class Run(Transformation):
    """Runs any function as a pass."""

    def __init__(self, body: Body) -> None:
        self.body = body

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return self.body(graph_module)  # type: ignore[return-value]  # what a pass returns wrongly is tested, too


class MulToAdd(Swap):
    def __init__(self) -> None:
        super().__init__("mul", "add")


class AddToSub(Swap):
    def __init__(self) -> None:
        super().__init__("add", "sub")


class AddToPower(ReversibleTransformation):
    """Goes by way of another pass, twice, and back."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        AddToSub()(graph_module)
        for node in iter_nodes(graph_module.graph):
            if node.target is operator.mul:
                node.target = operator.add
                self.mark_as_transformed(node)
        return AddToSub()(graph_module)

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        AddToSub()(graph_module, reverse=True)
        for node in self.get_transformed_nodes(graph_module):
            node.target = operator.mul
            self.mark_as_restored(node)
        return graph_module


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("offset", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * x + self.offset


def traced() -> GraphModule:
    torch.manual_seed(0)
    return symbolic_trace(Model())


def break_everything(graph_module: GraphModule) -> None:
    graph = graph_module.graph
    MulToAdd().transform(graph_module)
    nodes = list(iter_nodes(graph))
    nodes[1].name = "renamed"
    with graph.inserting_before(nodes[2]):
        graph.call_function(torch.relu, (nodes[0],))
    nodes[-1].args = (nodes[0],)
    graph.erase_node(nodes[-2])
    del graph_module.linear
    graph_module.extra = nn.Linear(1, 1)
    graph_module.train(not graph_module.training)


def failed(run: Transformation, error: type[BaseException], match: str | None = None, **demands: Any) -> Any:
    """The error of a run, which has left everything as it was."""
    graph_module = traced()
    before = state(graph_module)
    with pytest.raises(error, match=match) as caught:
        run(graph_module, **demands)
    assert state(graph_module) == before
    return caught.value


def raising(error: BaseException) -> Run:
    """A pass that breaks everything, and raises."""

    def body(graph_module: GraphModule) -> None:
        break_everything(graph_module)
        raise error

    return Run(body)


class TestErrors:
    @pytest.mark.parametrize("error", [ValueError("no luck"), FxoptError("no luck"), StopIteration(), AssertionError()])
    def test_are_named_and_chained_and_nothing_is_changed(self, error: Exception) -> None:
        expected = f"pass `run` failed, and it was rolled back: {type(error).__name__}"
        found = failed(raising(error), PassError, expected)
        assert found.__cause__ is error
        assert (found.pass_name, found.index) == ("run", None)

    @pytest.mark.parametrize("cls", [PreconditionError, VerificationError])
    def test_of_ones_own_kind_keep_their_class_and_cause(self, cls: type[PassError]) -> None:
        error = cls("not like this")
        error.__cause__ = cause = KeyError("deep")
        assert failed(raising(error), cls, "not like this").__cause__ is cause
        assert error.pass_name == "run"

    def test_an_interrupt_that_came_out_as_an_error_is_an_interrupt(self) -> None:
        """Torch makes errors of its own of what is raised in code that it traces or compiles."""
        interrupt = KeyboardInterrupt()

        def body(graph_module: GraphModule) -> None:
            break_everything(graph_module)
            try:
                try:
                    raise interrupt
                except KeyboardInterrupt as error:
                    raise RuntimeError("while running %add") from error
            except RuntimeError:
                raise ValueError("no result") from None  # Python keeps the context

        for run in (Run(body), compose(MulToAdd(), Run(body))):
            assert failed(run, KeyboardInterrupt) is interrupt

    def test_errors_while_an_interrupt_is_handled_are_errors(self) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            failed(raising(ValueError("no luck")), PassError, "no luck")

    def test_index_in_a_nested_composition(self) -> None:
        fails = raising(ValueError("no luck"))
        passes = compose(MulToAdd(), compose(AddToSub(), compose(), compose(MulToAdd(), fails)), MulToAdd())
        error = failed(passes, PassError, r"\(pass 3 of the composition\) failed")
        assert (error.pass_name, error.index) == ("run", 3)

    def test_index_counts_from_the_front_when_reversing(self) -> None:
        class Stuck(AddToSub):
            def reverse(self, graph_module: GraphModule) -> GraphModule:
                break_everything(graph_module)
                raise ValueError("stuck")

        passes = compose(MulToAdd(), Stuck())
        graph_module = passes(traced())
        before = state(graph_module)
        back: list[Callable[[], object]] = [lambda: passes(graph_module, reverse=True), lambda: undo(graph_module)]
        for reverse in back:
            with pytest.raises(PassError, match="undoing it was rolled back: ValueError: stuck") as caught:
                reverse()
            assert (caught.value.pass_name, caught.value.index) == ("stuck", 1)
            assert state(graph_module) == before

    @pytest.mark.parametrize("result", [None, 3, nn.Linear(1, 1)], ids=["None", "number", "module"])
    def test_what_is_no_graph_module_is_no_result(self, result: object) -> None:
        expected = rf"returned an? {type(result).__name__}, expected a torch.fx.GraphM"
        failed(Run(lambda graph_module: result), PostconditionError, expected)

    @pytest.mark.parametrize("given", [None, nn.Linear(1, 1), "model"])
    def test_what_is_no_graph_module_is_not_accepted(self, given: object) -> None:
        calls: list[Callable[[Any], object]] = [MulToAdd(), compose(MulToAdd(), AddToSub()), undo]
        for call in calls:
            with pytest.raises(PreconditionError, match=r"expected a torch.fx.GraphModule: capture the model first"):
                call(given)

    @pytest.mark.parametrize("fault", ["reads later", "no module", "no output"])
    def test_broken_graph_is_found(self, fault: str) -> None:
        def body(graph_module: GraphModule) -> GraphModule:
            nodes = list(iter_nodes(graph_module.graph))
            if fault == "reads later":
                nodes[1].args = (nodes[-2],)
            elif fault == "no output":
                graph_module.graph.erase_node(nodes[-1])
            else:
                del graph_module.linear
            return graph_module

        assert failed(Run(body), PostconditionError, "pass `run` left a broken graph").__cause__ is not None


class TestValues:
    @staticmethod
    def overwrite(graph_module: Any) -> None:
        with torch.no_grad():
            graph_module.linear.weight.mul_(2)
        raise ValueError("no luck")

    def test_written_in_place_are_reported(self) -> None:
        with pytest.raises(PassError, match=r"does not restore: linear\.weight\. Run it with protect_values=True"):
            Run(self.overwrite)(traced())

    def test_are_reported_with_errors_of_ones_own_kind(self) -> None:
        def body(graph_module: GraphModule) -> None:
            try:
                self.overwrite(graph_module)
            except ValueError:
                raise PreconditionError("not like this") from None

        with pytest.raises(PreconditionError, match=r"not like this.*linear\.weight"):
            Run(body)(traced())

    def test_come_back_where_protected(self) -> None:
        graph_module: Any = traced()
        before = graph_module.linear.weight.detach().clone()
        with pytest.raises(PassError) as caught:
            Run(self.overwrite)(graph_module, protect_values=True)
        assert "does not restore" not in str(caught.value)
        assert torch.equal(graph_module.linear.weight, before)


class Refuses(Transformation):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        run = editing_run(graph_module)
        assert run is not None
        run.refusals.append(Refusal("linear", "hooks", "module `linear` has hooks", ("linear",)))
        return MulToAdd().transform(graph_module)


class TestDemands:
    def test_expect_on_a_plain_pass(self) -> None:
        MulToAdd()(traced(), expect=1)
        expected = "rewrote 1 site, expected exactly 2; nothing was changed"
        assert failed(MulToAdd(), PostconditionError, expected, expect=2).pass_name == "mul-to-add"

    def test_expect_counts_all_passes_of_a_composition(self) -> None:
        compose(MulToAdd(), AddToSub())(traced(), expect=3)

    def test_strict_names_site_and_reason(self) -> None:
        expected = r"(?s)strict=True allows none.*linear: hooks: module `linear` has hooks"
        failed(Refuses(), PreconditionError, expected, strict=True)
        failed(compose(AddToSub(), Refuses()), PreconditionError, strict=True)
        assert history(Refuses()(traced()))[0].refusals[0].reason == "hooks"


class TestResults:
    def test_a_new_graph_module_takes_the_ledger_along(self) -> None:
        def body(graph_module: GraphModule) -> GraphModule:
            return GraphModule(graph_module, graph_module.graph)

        graph_module = MulToAdd()(traced())
        result = Run(body)(graph_module)
        assert result is not graph_module
        assert [record.pass_name for record in history(result)] == ["mul-to-add", "run"]
        assert [record.pass_name for record in history(graph_module)] == ["mul-to-add"]
        assert history(result)[-1].changed

    def test_a_pass_that_does_nothing_is_recorded_as_such(self) -> None:
        graph_module = Run(lambda graph_module: graph_module)(traced())
        assert [record.changed for record in history(graph_module)] == [False]
        assert undo(graph_module) is graph_module

    def test_arguments_that_are_set_twice_are_seen(self) -> None:
        def body(graph_module: GraphModule) -> GraphModule:
            for node in iter_nodes(graph_module.graph):
                for _ in range(4):  # the memory of the first tuple is free for the third one
                    node.args = (*node.args,)
            return graph_module

        assert all(history(Run(body)(traced()))[0].changed for _ in range(10))


class TestPassesInsideOfPasses:
    def test_are_one_run_and_undone_together(self) -> None:
        graph_module = traced()
        code = graph_module.code
        AddToPower()(graph_module)
        assert graph_module.code.count(" - ") == 2
        assert [record.pass_name for record in history(graph_module)] == ["add-to-sub", "add-to-sub", "add-to-power"]
        assert {record.run for record in history(graph_module)} == {0}
        undo(graph_module)
        assert graph_module.code == code
        assert {record.state for record in history(graph_module)} == {"undone"}
        AddToSub()(graph_module)
        assert history(graph_module)[-1].run == 1

    def test_error_of_the_inner_one_names_it_and_keeps_its_cause(self) -> None:
        cause = ValueError("no luck")

        class Outer(Transformation):
            def transform(self, graph_module: GraphModule) -> GraphModule:
                AddToSub()(graph_module)
                return raising(cause)(graph_module)

        error = failed(compose(MulToAdd(), Outer()), PassError, "pass `run` failed")
        assert error.__cause__ is cause
        assert (error.pass_name, error.index) == ("run", 1)

    def test_a_failure_that_is_caught_takes_back_the_inner_one_alone(self) -> None:
        class Outer(Transformation):
            def transform(self, graph_module: GraphModule) -> GraphModule:
                AddToSub()(graph_module)
                with pytest.raises(PassError):
                    raising(ValueError())(graph_module)
                return graph_module

        graph_module = Outer()(traced())
        assert [record.pass_name for record in history(graph_module)] == ["add-to-sub", "outer"]
        assert graph_module.code.count(" - ") == 1

    def test_on_another_graph_module(self) -> None:
        other = AddToSub()(traced())

        class Outer(Transformation):
            def transform(self, graph_module: GraphModule) -> GraphModule:
                compose(MulToAdd(), AddToSub())(other)
                compose(MulToAdd(), AddToSub()).transform(other)
                return graph_module

        graph_module = Outer()(traced())
        assert [(record.pass_name, record.run) for record in history(graph_module)] == [("outer", 0)]
        assert [record.run for record in history(other)] == [0, 1, 1, 2, 2]

    def test_composition_called_by_its_method(self) -> None:
        class Outer(Transformation):
            def transform(self, graph_module: GraphModule) -> GraphModule:
                return compose(MulToAdd(), AddToSub()).transform(graph_module)

        graph_module = Outer()(traced())
        assert [record.pass_name for record in history(graph_module)] == ["mul-to-add", "add-to-sub", "outer"]
        assert [record.index for record in history(graph_module)] == [0, 1, None]
        assert {record.run for record in history(graph_module)} == {0}


class TestContexts:
    def test_threads_do_not_disturb_each_other(self) -> None:
        ready = threading.Barrier(2)
        modules = [traced(), traced()]

        def body(graph_module: GraphModule) -> GraphModule:
            ready.wait(10)
            MulToAdd()(graph_module)
            ready.wait(10)
            return graph_module

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Run(body), modules))
        assert [[r.pass_name for r in history(module)] for module in modules] == [["mul-to-add", "run"]] * 2
