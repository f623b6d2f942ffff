"""`observing`: all instruments of the package at once, in an order in which each learns what it has to."""

from __future__ import annotations

import operator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import (
    LintAndRecompile,
    PreconditionError,
    Transformation,
    VerificationError,
    compose,
    iter_nodes,
)
from fxopt_core.passes.instruments import active_instruments
from fxopt_tools.watch.observation import observing

X = torch.linspace(-2, 2, 6)


class Model(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x


class Swap(Transformation):
    """``x + y`` -> ``x - y``, which is wrong."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in iter_nodes(graph_module.graph):
            if node.target is operator.add:
                node.target = operator.sub
        return graph_module


def test_times_and_counts_alone() -> None:
    with observing() as seen:
        compose(LintAndRecompile(), Swap())(symbolic_trace(Model()))
    assert seen.gate is None and seen.dumps is None
    assert [run.name for _, run in seen.timing.tree()[0].walk()] == ["compose", "lint-and-recompile", "swap"]
    assert [row.name for row in seen.statistics.rows()] == ["lint-and-recompile", "swap"]
    assert active_instruments() == ()


def test_the_gate_is_innermost_so_that_all_learn_of_what_it_finds(tmp_path: Path) -> None:
    with pytest.raises(VerificationError), observing(X, dumps=tmp_path) as seen:
        compose(LintAndRecompile(), Swap())(symbolic_trace(Model()))
    assert seen.gate is not None and [check.passed for check in seen.gate.checks] == [True, False]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["001_swap.before.txt", "001_swap.failed.txt"]
    assert [row.failed for row in seen.statistics.rows()] == [0, 1]
    assert [run.outcome for _, run in seen.timing.tree()[0].walk()] == [None, "done", "failed"]


def test_arguments_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(PreconditionError, match="holds files"), observing(dumps=tmp_path):
        pass
    with pytest.raises(PreconditionError, match="inputs is a str"), observing("x"):  # type: ignore[arg-type]  # the mistake under test
        pass
