"""`transform` and `reverse` of a site pass called as methods: they leave a record, and can be undone."""

from __future__ import annotations

import pickle

import pytest
import torch
from site_passes import Called, Retarget
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import PreconditionError, history, undo

RELU = Retarget(old="relu", new="tanh")


def traced() -> GraphModule:
    return symbolic_trace(Called(lambda x: torch.relu(x) + torch.sin(torch.sin(torch.relu(x)))))


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
