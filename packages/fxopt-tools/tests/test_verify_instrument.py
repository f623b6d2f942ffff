"""`Verify` as the gate of passes and compositions."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import (
    DeepCopy,
    LintAndRecompile,
    PassError,
    PreconditionError,
    ReversibleTransformation,
    Transformation,
    VerificationError,
    compose,
    history,
    instrumented,
    iter_nodes,
)
from fxopt_tools import Verify, verify

X = torch.linspace(-2, 2, 12).reshape(3, 4)


class Model(nn.Module):
    """Has an addition, and buffers that a run in train mode changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        normalised: Tensor = self.norm(self.linear(x))
        return normalised + x


def traced() -> GraphModule:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return symbolic_trace(Model())


def retarget(graph_module: GraphModule, old: object, new: Any) -> GraphModule:
    for node in iter_nodes(graph_module.graph):
        if node.target is old:
            node.target = new
    return graph_module


class Replace(ReversibleTransformation):
    """x + y -> what a function makes of x and y."""

    preserves_computation = True

    def __init__(self, by: Any) -> None:
        self.by = by

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return retarget(graph_module, operator.add, self.by)

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        return retarget(graph_module, self.by, operator.add)


class Unclaimed(Replace):
    """The same, which does not claim to preserve anything."""

    preserves_computation = False


class Scale(Transformation):
    """Writes into a parameter, which no comparison of graphs would show."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        with torch.no_grad():
            graph_module.get_parameter("linear.weight").mul_(1.5)
        return graph_module


# --- What stands and what does not


def test_passes_that_preserve_the_computation_stand() -> None:
    gate = Verify(X)
    graph_module = traced().eval()
    before = graph_module(X)
    with instrumented(gate):
        result = compose(Replace(torch.add), LintAndRecompile())(graph_module)
    assert torch.equal(result(X), before) and any(node.target is torch.add for node in iter_nodes(result.graph))
    assert [(check.pass_name, check.index, check.passed) for check in gate.checks] == [
        ("replace", 0, True),
        ("lint-and-recompile", 1, True),
    ]
    assert all(check.report is not None and check.report.passed for check in gate.checks)


def test_a_pass_that_does_not_is_an_error_and_everything_is_rolled_back() -> None:
    graph_module = traced().eval()
    before, code = graph_module(X), graph_module.code
    gate = Verify(X)
    with instrumented(gate), pytest.raises(VerificationError, match="pass `replace` changed what the module") as caught:
        compose(LintAndRecompile(), DeepCopy(), LintAndRecompile(), Replace(torch.sub), DeepCopy())(graph_module)
    assert caught.value.pass_name == "replace" and caught.value.index == 3
    assert "max absolute error" in str(caught.value) and "expected" in str(caught.value)
    assert graph_module.code == code and torch.equal(graph_module(X), before)
    assert [check.passed for check in gate.checks] == [True, True, True, False]


def test_a_veto_rolls_back_one_pass_alone() -> None:
    graph_module = traced().eval()
    before = graph_module(X)
    gate = Verify(X, on_failure="veto")
    with instrumented(gate):
        result = compose(Replace(torch.sub), LintAndRecompile(), Replace(torch.add))(graph_module)
    assert [check.passed for check in gate.checks] == [False, True, True]
    assert [record.state for record in history(result)] == ["vetoed", "applied", "applied"]
    assert torch.equal(result(X), before) and any(node.target is torch.add for node in iter_nodes(result.graph))
    assert str(gate.checks[0]) == "replace: FAILED" and gate.checks[0].report is not None
    assert gate.checks[0].report.worst is not None


def test_values_written_in_place_are_found() -> None:
    graph_module = traced().eval()
    before = graph_module(X)
    with instrumented(Verify(X)), pytest.raises(VerificationError):
        Scale()(graph_module, protect_values=True)
    assert torch.equal(graph_module(X), before)


def test_a_module_that_refuses_its_inputs_afterwards_does_not_stand() -> None:
    def broken(x: Tensor, y: Tensor) -> Tensor:
        raise RuntimeError("no such kernel")

    with instrumented(Verify(X)), pytest.raises(VerificationError, match="refuses inputs that it took") as caught:
        Replace(broken)(traced())
    assert isinstance(caught.value.__cause__, RuntimeError) and "no such kernel" in str(caught.value)
    gate = Verify(X, on_failure="veto")
    with instrumented(gate):
        result = Replace(broken)(traced())
    assert verify(traced(), result, X) and gate.checks[0].passed is False and "refuses" in str(gate.checks[0])


# --- When it runs the module


def test_a_pass_that_calls_another_one_is_gated_with_it() -> None:
    class Outer(Transformation):
        preserves_computation = True

        def transform(self, graph_module: GraphModule) -> GraphModule:
            return Replace(torch.add)(graph_module)

    gate = Verify(X)
    with instrumented(gate):
        compose(LintAndRecompile(), Outer(), LintAndRecompile())(traced())
    assert [check.pass_name for check in gate.checks] == [
        "lint-and-recompile",
        "replace",
        "outer",
        "lint-and-recompile",
    ]
    assert all(check.passed for check in gate.checks)


class Part(nn.Module):
    """A part that takes other inputs than the whole."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class OnParts(Transformation):
    """A pass that calls another one on a graph module inside of the whole."""

    preserves_computation = True

    def __init__(self, part: Any, by: Any) -> None:
        self.part, self.by = part, by

    def transform(self, graph_module: GraphModule) -> GraphModule:
        Replace(self.by)(self.part)
        return graph_module


def test_a_pass_on_another_graph_module_inside_of_a_pass_is_checked_with_that() -> None:
    gate, part = Verify(X), symbolic_trace(Part())
    with instrumented(gate):
        compose(OnParts(part, torch.sub), LintAndRecompile())(traced())
    assert [(check.pass_name, check.passed) for check in gate.checks] == [
        ("replace", None), ("on-parts", True), ("lint-and-recompile", True)
    ]  # fmt: skip
    assert "works on another graph module, inside of a pass that is checked" in str(gate.checks[0])


# --- Errors


def test_inputs_that_the_module_refuses_are_an_error_before_the_pass() -> None:
    graph_module = traced()
    code = graph_module.code
    gate = Verify(X[:, :2])
    with instrumented(gate), pytest.raises(PreconditionError, match="before pass `unclaimed`") as caught:
        compose(Unclaimed(torch.add), Unclaimed(operator.add), Replace(torch.add))(graph_module)
    assert caught.value.pass_name == "unclaimed" and caught.value.index == 0
    assert isinstance(caught.value.__cause__, RuntimeError) and graph_module.code == code


def test_a_pass_that_fails_by_itself_fails_as_ever() -> None:
    class Fails(Transformation):
        preserves_computation = True

        def transform(self, graph_module: GraphModule) -> GraphModule:
            raise ValueError("of its own")

    gate = Verify(X)
    with instrumented(gate), pytest.raises(PassError, match="of its own"):
        Fails()(traced())
    assert gate.checks == []
    with instrumented(gate):
        LintAndRecompile()(traced())
