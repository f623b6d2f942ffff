"""`transform` and `reverse` of a site pass called as methods: they leave a record, and can be undone."""

from __future__ import annotations

import pickle

import pytest
import torch
from site_passes import Retarget
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import PostconditionError, PreconditionError, ReversibleTransformation, history, undo

RELU, SIN = Retarget(old="relu", new="tanh"), Retarget(old="sin", new="cos", but="sin_1")


class Both(ReversibleTransformation):
    """Two passes in one, called by their methods."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return SIN.transform(RELU.transform(graph_module))

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        return RELU.reverse(SIN.reverse(graph_module))


class Model(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) + torch.sin(torch.sin(torch.relu(x)))


def traced() -> GraphModule:
    return symbolic_trace(Model())


def recompiled(graph_module: GraphModule) -> str:
    graph_module.recompile()
    return graph_module.code


class TestAlone:
    def test_leaves_the_record_that_calling_the_pass_leaves(self) -> None:
        graph_module = traced()
        assert RELU.transform(graph_module) is graph_module
        (record,), (expected,) = history(graph_module), history(RELU(traced()))
        assert (record.pass_name, record.signature) == (expected.pass_name, expected.signature)
        assert (record.rewrites, record.journal) == (expected.rewrites, expected.journal)
        assert (record.run, record.index, record.state) == (0, None, "applied")

    @pytest.mark.parametrize("how", ["reverse", "call", "undo", "pickle"])
    def test_can_be_undone(self, how: str) -> None:
        graph_module = RELU.transform(traced())
        if how == "reverse":
            RELU.reverse(graph_module)
        elif how == "call":
            RELU(graph_module, reverse=True)
        else:
            graph_module = undo(pickle.loads(pickle.dumps(graph_module)) if how == "pickle" else graph_module)
        assert recompiled(graph_module) == traced().code
        assert [record.state for record in history(graph_module)] == ["undone"]

    def test_what_is_no_graph_module_is_refused(self) -> None:
        with pytest.raises(PreconditionError, match="`retarget`"):
            RELU.transform(nn.ReLU())  # type: ignore[arg-type]  # on purpose

    def test_a_subclass_may_call_that_of_its_base(self) -> None:
        class Verbose(Retarget):
            def transform(self, graph_module: GraphModule) -> GraphModule:
                return super().transform(super().transform(graph_module))

        for graph_module in (
            Verbose(old="relu", new="tanh")(traced()),
            Verbose(old="relu", new="tanh").transform(traced()),
        ):
            assert {record.pass_name for record in history(graph_module)} == {"verbose"}
            assert recompiled(undo(undo(graph_module))) == traced().code


class TestInsideOfAnother:
    def test_undoing_it_undoes_what_it_called(self) -> None:
        for back in (lambda g: Both()(g, reverse=True), undo):
            graph_module = Both()(traced())
            assert "torch.tanh" in graph_module.code and "torch.cos" in graph_module.code
            assert back(graph_module).code == traced().code
            assert [record.state for record in history(graph_module)] == ["undone"] * 3

    def test_is_part_of_its_run(self) -> None:
        graph_module = Both()(RELU(traced()))
        assert [(record.pass_name, record.run) for record in history(graph_module)] == [
            ("retarget", 0),
            ("retarget", 1),
            ("retarget", 1),
            ("both", 1),
        ]

    def test_its_sites_count_where_a_number_is_demanded(self) -> None:
        assert len(history(Both()(traced(), expect=3))) == 3
        graph_module = traced()
        with pytest.raises(PostconditionError, match="rewrote 3 sites, expected exactly 2"):
            Both()(graph_module, expect=2)
        with pytest.raises(PreconditionError, match=r"refused 1 of 4 sites[\s\S]*`sin_1` is left alone"):
            Both()(graph_module, strict=True)
        assert graph_module.code == traced().code and history(graph_module) == ()
