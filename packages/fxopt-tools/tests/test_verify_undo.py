"""`Verify` gates reversals, pass by pass, and rolls all of it back where one step computes otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from site_passes import Computes, ReluToClamp
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import (
    LintAndRecompile,
    ReversibleTransformation,
    VerificationError,
    compose,
    history,
    instrumented,
    iter_nodes,
)
from fxopt_tools import Verify

X = torch.linspace(-2, 2, 12).reshape(3, 4)


class BadlyUndone(ReversibleTransformation):
    """``sin(x)`` -> ``torch.sin(x)`` by another name, and back to the cosine."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return self.retarget(graph_module, torch.sin, torch.Tensor.sin)

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        return self.retarget(graph_module, torch.Tensor.sin, torch.cos)

    def retarget(self, graph_module: GraphModule, old: object, new: Any) -> GraphModule:
        for node in iter_nodes(graph_module.graph):
            if node.target is old:
                node.target = new
        return graph_module


def traced() -> GraphModule:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return symbolic_trace(Computes(lambda m, x: torch.relu(m.linear(x)) + torch.sin(x), linear=nn.Linear(4, 4)))


def test_every_pass_that_is_taken_back_is_checked() -> None:
    graph_module = compose(ReluToClamp(), compose(ReluToClamp()))(traced())
    ReluToClamp()(graph_module)
    gate = Verify(X)
    with instrumented(gate):
        ReluToClamp()(graph_module, reverse=True)
        compose(ReluToClamp(), LintAndRecompile())(ReluToClamp()(graph_module), reverse=True)
    assert str(gate.checks[0]) == "undoing relu-to-clamp: passed" and all(check.passed for check in gate.checks)
    assert [check.reverse for check in gate.checks] == [True, False, True, True]


def test_one_that_computes_otherwise_is_an_error_and_nothing_is_taken_back() -> None:
    passes = compose(BadlyUndone(), ReluToClamp())
    graph_module = passes(traced())
    code, made, before = graph_module.code, history(graph_module), graph_module(X)
    gate = Verify(X)
    changed = pytest.raises(VerificationError, match="pass `badly-undone` changed what the module computes")
    with changed as caught, instrumented(gate):
        passes(graph_module, reverse=True)
    assert (caught.value.pass_name, caught.value.index) == ("badly-undone", 0)
    assert [check.passed for check in gate.checks] == [True, False] and all(check.reverse for check in gate.checks)
    assert (graph_module.code, history(graph_module)) == (code, made) and torch.equal(graph_module(X), before)
