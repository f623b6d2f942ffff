"""`BisectLimit` does the first n rewrites, `LeaveOut` all but those named."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from planted import AddToSub, DropTail, MulToDiv, steps
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace

from fxopt_core import LintAndRecompile, PreconditionError, compose, history, instrumented, iter_nodes, undo
from fxopt_tools import BisectLimit, LeaveOut, RewriteStep
from fxopt_tools.rewrite_steps import source_lines

PASSES = compose(AddToSub(), DropTail(wrong=False), MulToDiv())


def rewritten(graph_module: GraphModule) -> list[str]:
    return [rewrite.site for record in history(graph_module) for rewrite in record.rewrites]


class TestLimits:
    def test_without_a_limit_all_are_done_and_counted(self) -> None:
        limit, graph_module = BisectLimit(), steps(2)
        with instrumented(limit):
            PASSES(graph_module)
        assert [step.number for step in limit.steps] == [1, 2, 3, 4, 5, 6, 7]
        assert [step.site for step in limit.steps] == ["at add", "at add_1", None] + [
            f"at {name}" for name in ("mul", "mul_1", "mul_2", "mul_3")
        ]

    @pytest.mark.parametrize("number", range(9))
    def test_the_first_ones_are_done(self, number: int) -> None:
        limit, everything, graph_module = BisectLimit(number), BisectLimit(), steps(2)
        with instrumented(everything):
            PASSES(steps(2))
        with instrumented(limit):
            PASSES(graph_module)
        assert limit.steps == everything.steps[:number]
        assert rewritten(graph_module) == [step.site for step in limit.steps if step.site is not None]
        for refusal in (refusal for record in history(graph_module) for refusal in record.refusals):
            assert refusal.reason == "instrument"

    def test_counting_goes_on_over_runs_and_undoing_counts_for_nothing(self) -> None:
        limit, graph_module = BisectLimit(5), symbolic_trace(nn.ReLU())
        with instrumented(limit):
            for _ in range(3):
                LintAndRecompile()(graph_module)
            LintAndRecompile()(graph_module, reverse=True)
            undo(graph_module)
        assert len(limit.steps) == 3

    @pytest.mark.parametrize("limit", [-1, 1.0, True, "3"])
    def test_a_limit_is_a_number(self, limit: Any) -> None:
        with pytest.raises(PreconditionError, match="expected a number of rewrites from 0"):
            BisectLimit(limit)


class TestLeavingOut:
    def test_sites_passes_and_steps(self) -> None:
        graph_module = steps(2)
        left_out = RewriteStep(None, "mul-to-div", 2, "at mul_1")
        with instrumented(LeaveOut("add-to-sub", left_out)):
            PASSES(graph_module)
        assert rewritten(graph_module) == ["at mul", "at mul_2", "at mul_3"]
        assert sum(node.target is operator.add for node in iter_nodes(graph_module.graph)) == 2

    @pytest.mark.parametrize(("index", "count"), [(2, 3), (None, 3), (1, 4)])
    def test_the_position_of_the_pass_counts_where_it_is_known(self, index: int | None, count: int) -> None:
        graph_module = steps(2)
        with instrumented(LeaveOut(RewriteStep(None, "mul-to-div", index, "at mul"))):
            PASSES(graph_module)
        assert len(history(graph_module)[-1].rewrites) == count


class TestSources:
    def test_frames_of_torch_are_passed_over(self) -> None:
        node = Graph().placeholder("x")
        inside = f'File "{torch.__file__}", line 9, in forward\n    return F.linear(x)\n'
        node.meta["stack_trace"] = f'File "m.py", line 3, in forward\n    self.q(x)\n{inside}'
        assert source_lines([node]) == ("m.py:3: self.q(x)",)
        node.meta["stack_trace"] = inside
        assert source_lines([node]) == ()
        node.meta["stack_trace"] = 'File "m.py", line 3, in forward'
        assert source_lines([node, node]) == ("m.py:3",)
        node.meta["stack_trace"] = None
        assert source_lines([node]) == ()
