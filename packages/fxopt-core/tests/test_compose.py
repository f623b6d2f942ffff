from __future__ import annotations

import copy
import pickle
from typing import Any

import operator_swaps
import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace
from traced_blocks import mutable_parts, state

from fxopt_core import (
    Composition,
    DeepCopy,
    LintAndRecompile,
    NotReversibleError,
    PassError,
    PreconditionError,
    ReversibleTransformation,
    Transformation,
    compose,
    history,
    iter_nodes,
    undo,
)

_LOG: list[str] = []


class Swap(operator_swaps.Swap):
    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        _LOG.append(f"{self.old}>{self.new}")
        return super().transform(graph_module)

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        _LOG.append(f"{self.old}<{self.new}")
        return super().reverse(graph_module)


class OneWay(Transformation):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        _LOG.append("one way")
        return graph_module


class Fails(ReversibleTransformation):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph_module.graph.erase_node(list(iter_nodes(graph_module.graph))[-1])
        raise ValueError("no luck")

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("offset", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.linear(x)) + self.offset


@pytest.fixture(autouse=True)
def _empty_log() -> None:
    _LOG.clear()


def traced() -> GraphModule:
    torch.manual_seed(0)
    graph_module = symbolic_trace(Model().eval())
    graph_module._non_persistent_buffers_set.add("offset")  # which tracing forgets
    return graph_module


ADD_MUL, MUL_SUB = Swap("add", "mul"), Swap("mul", "sub")


class TestOrder:
    def test_the_first_argument_runs_first_and_is_undone_last(self) -> None:
        graph_module, passes = traced(), compose(ADD_MUL, compose(MUL_SUB, Swap("sub", "truediv")))
        code = graph_module.code
        passes(graph_module)
        assert (_LOG, " / " in graph_module.code) == (["add>mul", "mul>sub", "sub>truediv"], True)
        _LOG.clear()
        passes(graph_module, reverse=True)
        assert _LOG == ["sub<truediv", "mul<sub", "add<mul"]
        assert graph_module.code == code
        assert {record.state for record in history(graph_module)} == {"undone"}

    def test_undo_undoes_the_whole_composition(self) -> None:
        graph_module = traced()
        code = graph_module.code
        compose(ADD_MUL, MUL_SUB)(Swap("truediv", "mod")(graph_module))
        undo(graph_module)
        assert graph_module.code == code
        assert [record.state for record in history(graph_module)] == ["applied", "undone", "undone"]

    def test_undo_skips_what_was_undone_by_its_own_pass(self) -> None:
        graph_module = traced()
        code = graph_module.code
        compose(ADD_MUL, MUL_SUB)(graph_module)
        MUL_SUB(graph_module, reverse=True)
        undo(graph_module)
        assert graph_module.code == code

    def test_lints_and_recompiles_once_at_the_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[str] = []
        graph_module = traced()

        def counted(owner: type, name: str) -> None:
            original = getattr(owner, name)

            def call(self: object) -> object:
                calls.append(name)
                return original(self)

            monkeypatch.setattr(owner, name, call)

        counted(type(graph_module.graph), "lint")
        counted(type(graph_module), "recompile")
        passes = compose(ADD_MUL, compose(MUL_SUB, OneWay()), OneWay())
        passes(graph_module)
        assert calls == ["lint", "recompile"]
        passes(graph_module, lint_and_recompile=False)
        assert calls == ["lint", "recompile"]


class TestMembers:
    def test_none_is_the_identity(self) -> None:
        graph_module, nothing = traced(), compose()
        code = graph_module.code
        assert nothing(graph_module) is graph_module
        assert nothing(graph_module, reverse=True) is graph_module
        assert (graph_module.code, history(graph_module)) == (code, ())
        assert nothing.preserves_computation
        assert isinstance(nothing, ReversibleTransformation)

    def test_one_behaves_as_that_one(self) -> None:
        assert compose(ADD_MUL) == ADD_MUL
        assert compose(ADD_MUL).signature == ADD_MUL.signature
        graph_module = traced()
        code = graph_module.code
        alone = compose(ADD_MUL)
        alone(graph_module)
        alone(graph_module, reverse=True)
        assert graph_module.code == code
        assert not isinstance(compose(OneWay()), ReversibleTransformation)

    def test_reversible_exactly_if_all_are(self) -> None:
        assert isinstance(compose(ADD_MUL, compose(MUL_SUB), DeepCopy()), ReversibleTransformation)
        mixed = compose(ADD_MUL, compose(MUL_SUB, OneWay()))
        assert isinstance(mixed, Composition)
        assert not isinstance(mixed, ReversibleTransformation)
        graph_module = mixed(traced())
        before = state(graph_module)
        with pytest.raises(NotReversibleError, match=r"`compose` is not reversible: `one-way` cannot be undone"):
            mixed(graph_module, reverse=True)  # type: ignore[arg-type]  # that is the point
        assert state(graph_module) == before

    def test_undo_refuses_if_one_changed_something_for_good(self) -> None:
        class ForGood(Transformation):
            def transform(self, graph_module: GraphModule) -> GraphModule:
                return ADD_MUL.transform(graph_module)

        graph_module = compose(MUL_SUB, ForGood())(traced())
        with pytest.raises(NotReversibleError, match="for-good"):
            undo(graph_module)

    def test_undo_does_not_mind_an_irreversible_one_that_did_nothing(self) -> None:
        graph_module = traced()
        code = graph_module.code
        undo(compose(ADD_MUL, OneWay())(graph_module))
        assert graph_module.code == code

    @pytest.mark.parametrize("wrong", [Swap, nn.ReLU(), None, "swap"])
    def test_have_to_be_passes(self, wrong: object) -> None:
        with pytest.raises(PreconditionError, match=r"argument 1 of compose is .*, expected an instance of"):
            compose(ADD_MUL, wrong)  # type: ignore[call-overload]  # that is the point

    @pytest.mark.parametrize(
        ("members", "expected"),
        [((), True), ((ADD_MUL,), True), ((ADD_MUL, DeepCopy()), True), ((ADD_MUL, OneWay()), False)],
    )
    def test_preserves_computation_is_the_conjunction(
        self, members: tuple[Transformation, ...], expected: bool
    ) -> None:
        assert compose(*members).preserves_computation is expected
        assert compose(compose(*members), inplace=False).preserves_computation is expected

    def test_marks_of_all_members(self) -> None:
        passes = compose(ADD_MUL, MUL_SUB)
        graph_module = passes(traced())
        (node,) = passes.get_transformed_nodes(graph_module)
        assert passes.transformed(node)
        assert ADD_MUL.transformed(node)


class TestIdentity:
    def test_equal_compositions_have_equal_signatures(self) -> None:
        assert compose(ADD_MUL, MUL_SUB) == compose(Swap(), Swap("mul", "sub"))
        assert hash(compose(ADD_MUL, MUL_SUB)) == hash(compose(Swap(), Swap("mul", "sub")))
        different = [
            compose(),
            compose(ADD_MUL, MUL_SUB),
            compose(MUL_SUB, ADD_MUL),
            compose(ADD_MUL, MUL_SUB, inplace=False),
            compose(ADD_MUL, OneWay()),
            compose(ADD_MUL, compose(MUL_SUB, OneWay())),
            compose(ADD_MUL, inplace=False),
        ]
        assert len({item.signature for item in different}) == len(different)
        assert len({item.uuid() for item in different}) == len(different)

    @pytest.mark.parametrize(
        "passes",
        [
            compose(),
            compose(ADD_MUL),
            compose(ADD_MUL, inplace=False),
            compose(ADD_MUL, compose(MUL_SUB, OneWay()), inplace=False),
        ],
        ids=repr,
    )
    def test_copies_and_pickles(self, passes: Transformation) -> None:
        for twin in (pickle.loads(pickle.dumps(passes)), copy.deepcopy(passes), copy.copy(passes)):
            assert twin == passes
            assert type(twin) is type(passes)
            assert repr(twin) == repr(passes)
            assert twin.preserves_computation == passes.preserves_computation


class TestTransaction:
    def test_error_behind_a_copy_restores_the_input(self) -> None:
        graph_module = traced()
        before = state(graph_module)
        with pytest.raises(PassError) as caught:
            compose(ADD_MUL, compose(MUL_SUB, inplace=False), Fails())(graph_module)
        assert caught.value.index == 2
        assert state(graph_module) == before


class TestNotInPlace:
    @pytest.mark.parametrize(
        "passes",
        [
            compose(ADD_MUL, MUL_SUB, inplace=False),
            compose(ADD_MUL, inplace=False),
            compose(inplace=False),
            compose(DeepCopy(), ADD_MUL, MUL_SUB),
            compose(compose(ADD_MUL, inplace=False), MUL_SUB),
        ],
        ids=repr,
    )
    def test_changes_nothing_of_its_input_in_either_direction(self, passes: ReversibleTransformation) -> None:
        graph_module = traced()
        code, before = graph_module.code, state(graph_module)
        result = passes(graph_module)
        assert state(graph_module) == before
        assert not mutable_parts(graph_module) & mutable_parts(result)
        middle = state(result)
        back = passes(result, reverse=True)
        if isinstance(passes, Composition) and not passes.inplace:
            assert state(result) == middle
            assert not mutable_parts(result) & mutable_parts(back)
        assert back.code == code

    def test_undo_of_the_copy(self) -> None:
        graph_module = traced()
        code = graph_module.code
        result = compose(ADD_MUL, MUL_SUB, inplace=False)(graph_module)
        assert undo(result).code == code
        assert history(graph_module) == ()


class TestDeepCopyAndLint:
    def test_undo_after_a_copy_undoes_what_came_before(self) -> None:
        graph_module = traced()
        code = graph_module.code
        twin = DeepCopy()(ADD_MUL(graph_module))
        assert undo(twin).code == code

    def test_lint_and_recompile(self) -> None:
        graph_module = traced()
        ADD_MUL(graph_module, lint_and_recompile=False)
        LintAndRecompile()(graph_module, lint_and_recompile=False)
        assert "offset" in graph_module.code
        assert " * " in graph_module.code
        LintAndRecompile()(graph_module, reverse=True)
        output = list(iter_nodes(graph_module.graph))[-1]
        output.prepend(next(iter_nodes(graph_module.graph)))
        with pytest.raises(PassError, match="lint-and-recompile"):
            LintAndRecompile()(graph_module, lint_and_recompile=False)
