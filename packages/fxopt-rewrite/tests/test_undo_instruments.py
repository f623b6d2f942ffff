"""Instruments see every reversal: of one pass, of a composition, by `undo`; and what keeps it from happening."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterable

import pytest
import torch
from operator_swaps import Swap
from site_passes import Retarget
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import (
    Instrument,
    PassRun,
    PreconditionError,
    Record,
    RecordedPass,
    ReversibleTransformation,
    UndoError,
    VerificationError,
    compose,
    history,
    instrumented,
    iter_nodes,
    undo,
)
from fxopt_core.errors import VetoError


class Both(ReversibleTransformation):
    """A pass that calls others inside of itself."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return Retarget()(Swap()(graph_module))

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        return Swap()(Retarget()(graph_module, reverse=True), reverse=True)


class Model(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) + torch.sin(x)


def traced() -> GraphModule:
    return symbolic_trace(Model())


PASSES = compose(Retarget(), Swap(), compose(Retarget("sin", "cos"), Swap()))  # the last one finds nothing to do
BACK = [("retarget", 2), ("swap", 1), ("retarget", 0)]  # in the order in which undo takes them back


class Watch(Instrument):
    """Writes down all that it is told."""

    may_veto = False

    def __init__(self) -> None:
        self.runs: list[PassRun] = []
        self.told: list[str] = []
        self.records: list[Record] = []

    def before_pass(self, run: PassRun, graph_module: GraphModule) -> None:
        self.runs.append(run)
        self.told.append(f"before {run.name}")

    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> bool | None:
        self.told.append(f"after {run.name}")
        self.records.append(record)
        return None

    def after_pass_failed(self, run: PassRun, graph_module: GraphModule, error: BaseException) -> None:
        self.told.append(f"failed {run.name}: {type(error).__name__}")


class Vetoes(Instrument):
    def __init__(self, index: int | None) -> None:
        self.index = index

    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> bool | None:
        return run.index != self.index


class Skips(Instrument):
    def should_run(self, run: PassRun, graph_module: GraphModule) -> bool:
        return run.index != 1


class TestUndo:
    def test_is_a_run_of_each_pass_in_reverse_last_first(self) -> None:
        graph_module = PASSES(traced())
        watch = Watch()
        with instrumented(watch):
            undo(graph_module)
        assert [(run.name, run.index) for run in watch.runs] == BACK
        assert [run.before for run in watch.runs] == [(), ("retarget",), ("retarget", "swap")]
        assert all(run.reverse for run in watch.runs)
        assert [run.transformation for run in watch.runs] == [Retarget("sin", "cos"), Swap(), Retarget()]
        parents = [run.parent for run in watch.runs]
        assert parents[0] is not None and parents[0].name == "undo" and parents[0].reverse
        assert parents[0] is parents[1] is parents[2] and parents[0].parent is None
        assert watch.told == [f"{when} {name}" for name, _ in BACK for when in ("before", "after")]

    def test_gives_the_record_of_what_was_taken_back(self) -> None:
        graph_module = PASSES(traced())
        made = history(graph_module)
        watch = Watch()
        with instrumented(watch):
            undo(graph_module)
        assert [record.state for record in watch.records] == ["undone"] * 3
        assert [record.rewrites for record in watch.records] == [made[n].rewrites for n in (2, 1, 0)]
        assert all(record.rewrites and record.seconds > 0 and record.changed for record in watch.records)
        assert all(record.journal is None and record.refusals == () for record in watch.records)

    def test_of_a_pass_that_called_others(self) -> None:
        graph_module = Both()(traced())
        code = traced().code
        watch = Watch()
        with instrumented(watch):
            undo(graph_module)
        assert graph_module.code == code
        assert [run.name for run in watch.runs] == ["both", "retarget", "swap"]
        assert [run.parent and run.parent.name for run in watch.runs] == ["undo", "both", "both"]
        assert watch.told[-1] == "after both"


class TestStandIns:
    def local(self) -> GraphModule:
        class Local(Retarget):
            preserves_computation = False

        graph_module = Local("relu", "tanh")(traced())
        del Local
        gc.collect()  # takes the class away, as another process would not have it
        return graph_module

    def test_have_the_name_options_and_signature_of_the_record(self) -> None:
        graph_module = self.local()
        watch = Watch()
        with instrumented(watch):
            undo(graph_module)
        (run,) = watch.runs
        (record,) = history(graph_module)
        assert isinstance(run.transformation, RecordedPass)
        assert run.name == record.pass_name == "local"
        assert run.transformation.signature == record.signature
        assert dict(run.transformation.options) == {"old": "relu", "new": "tanh", "but": ""}
        assert not run.transformation.preserves_computation
        assert graph_module.code == traced().code

    def test_equal_the_pass_and_undo_it(self) -> None:
        graph_module = Retarget()(traced())
        stand_in = RecordedPass(history(graph_module)[0])
        assert stand_in == Retarget() and hash(stand_in) == hash(Retarget())
        assert pickle.loads(pickle.dumps(stand_in)) == stand_in
        assert len(stand_in.get_transformed_nodes(graph_module)) == len(Retarget().get_transformed_nodes(graph_module))
        stand_in(graph_module, reverse=True)
        assert graph_module.code == traced().code and history(graph_module)[0].state == "undone"

    def test_cannot_be_applied(self) -> None:
        stand_in = RecordedPass(Record("gone", "no.such:Gone", (), "a1"))
        with pytest.raises(PreconditionError, match=r"`gone` cannot be applied.*no\.such:Gone.*Install"):
            stand_in(traced())

    def test_of_a_pass_without_a_signature_have_none(self) -> None:
        stand_in = RecordedPass(Record("gone", "no.such:Gone", (), ""))
        with pytest.raises(TypeError, match="no signature"):
            _ = stand_in.signature
        assert stand_in == stand_in and stand_in != RecordedPass(Record("gone", "no.such:Gone", (), ""))


class TestAllOrNothing:
    @pytest.mark.parametrize("index", [2, 1, 0])
    def test_a_veto_of_one_pass_is_an_error_and_changes_nothing(self, index: int) -> None:
        graph_module = PASSES(traced())
        code, made = graph_module.code, history(graph_module)
        watch = Watch()
        vetoed = pytest.raises(VetoError, match=r"undoing pass `\w+` was vetoed by Vetoes.*nothing was changed")
        with vetoed as caught, instrumented(watch, Vetoes(index)):
            undo(graph_module)
        assert caught.value.index == index and caught.value.pass_name == made[index].pass_name
        assert (graph_module.code, history(graph_module)) == (code, made)
        assert watch.told[-1] == f"failed {made[index].pass_name}: VetoError"
        assert undo(graph_module).code == traced().code

    def test_so_is_to_skip_one(self) -> None:
        graph_module = PASSES(traced())
        code, made = graph_module.code, history(graph_module)
        declined = pytest.raises(VetoError, match=r"undoing pass `swap` was declined by Skips \(should_run\)")
        with declined, instrumented(Skips()):
            undo(graph_module)
        assert (graph_module.code, history(graph_module)) == (code, made)

    def test_so_is_what_an_instrument_raises(self) -> None:
        class Gate(Instrument):
            def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> None:
                if run.index == 0:
                    raise VerificationError("off by one")

        graph_module = PASSES(traced())
        code, made = graph_module.code, history(graph_module)
        watch = Watch()
        with pytest.raises(VerificationError) as caught, instrumented(watch, Gate()):
            undo(graph_module)
        assert (caught.value.pass_name, caught.value.index) == ("retarget", 0)
        assert (graph_module.code, history(graph_module)) == (code, made)
        assert watch.told[-1] == "failed retarget: VerificationError"

    def test_so_is_a_step_that_has_become_impossible(self) -> None:
        graph_module = PASSES(traced())
        (node,) = (node for node in iter_nodes(graph_module.graph) if node.target is torch.tanh)
        node.target = torch.abs
        graph_module.recompile()
        code, made = graph_module.code, history(graph_module)
        watch = Watch()
        with pytest.raises(UndoError, match="was changed since") as caught, instrumented(watch):
            undo(graph_module)
        assert caught.value.index == 0
        assert watch.told == [
            "before retarget", "after retarget", "before swap", "after swap", "before retarget",
            "failed retarget: UndoError",
        ]  # fmt: skip
        assert (graph_module.code, history(graph_module)) == (code, made)

    def test_the_modules_code_runs_between_the_steps(self) -> None:
        x = torch.linspace(-1, 1, 5)
        sums: list[float] = []

        class Runs(Instrument):
            runs_module = True

            def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> None:
                sums.append(float(graph_module(x).sum()))

        graph_module = PASSES(traced())
        with instrumented(Runs()):
            undo(graph_module)
        expected = [torch.tanh(x) * torch.sin(x), torch.tanh(x) + torch.sin(x), torch.relu(x) + torch.sin(x)]
        assert sums == pytest.approx([float(value.sum()) for value in expected])


class TestReversingAComposition:
    def runs(self, *instruments: Instrument) -> tuple[GraphModule, Watch]:
        graph_module = PASSES(traced())
        watch = Watch()
        with instrumented(watch, *instruments):
            PASSES(graph_module, reverse=True)
        return graph_module, watch

    def test_is_seen_likewise(self) -> None:
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
