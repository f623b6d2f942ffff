from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node, symbolic_trace
from traced_blocks import node_rows

from fxopt_core import (
    NotReversibleError,
    ReversibleTransformation,
    Transformation,
    history,
    iter_nodes,
    undo,
)


class MulToAdd(Transformation):
    """Every ``operator.mul`` becomes ``operator.add``, as in the optimum guide."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.nodes:
            if node.op == "call_function" and node.target is operator.mul:
                node.target = operator.add
                self.mark_as_transformed(node)
        return graph_module


class ScaleArgument(ReversibleTransformation):
    """Multiply and divide an argument of every addition by two, as in the optimum guide."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        for node in list(iter_nodes(graph)):
            if node.target is operator.add and not self.transformed(node):
                with graph.inserting_before(node):
                    doubled = graph.call_function(operator.mul, (node.args[0], 2))
                    halved = graph.call_function(operator.truediv, (doubled, 2))
                node.update_arg(0, halved)
                self.mark_as_transformed(node)
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        for node in self.get_transformed_nodes(graph_module):
            halved = node.args[0]
            assert isinstance(halved, Node)
            doubled = halved.args[0]
            assert isinstance(doubled, Node)
            node.update_arg(0, doubled.args[0])
            graph_module.graph.erase_node(halved)
            graph_module.graph.erase_node(doubled)
            self.mark_as_restored(node)
        return graph_module


class Options(Transformation):
    def __init__(self, ratio: float = 0.5, *names: str, where: object = "*") -> None:
        self.ratio = ratio
        self.names = names
        self.where = where
        self.runs = 0

    def transform(self, graph_module: GraphModule) -> GraphModule:
        self.runs += 1
        return graph_module


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x) * x
        return y + x * 3


def traced() -> GraphModule:
    torch.manual_seed(0)
    return symbolic_trace(Model().eval())


class TestPlainPass:
    def test_changes_what_is_computed(self) -> None:
        graph_module, x = traced(), torch.randn(2, 3)
        expected = (graph_module.get_submodule("linear")(x) + x) + (x + 3)
        assert MulToAdd()(graph_module) is graph_module
        assert torch.equal(graph_module(x), expected)

    def test_marks_are_found_by_an_equal_pass(self) -> None:
        graph_module = MulToAdd()(traced())
        assert [node.name for node in MulToAdd().get_transformed_nodes(graph_module)] == ["mul", "mul_1"]
        assert not Options().get_transformed_nodes(graph_module)

    def test_record_names_the_nodes(self) -> None:
        (record,) = history(MulToAdd()(traced()))
        assert [rewrite.after for rewrite in record.rewrites] == [("mul",), ("mul_1",)]
        assert [rewrite.before for rewrite in record.rewrites] == [("mul",), ("mul_1",)]
        assert (record.state, record.changed, record.reversible, record.run, record.index) == (
            "applied", True, False, 0, None
        )  # fmt: skip
        assert record.seconds > 0

    def test_applied_twice_is_recorded_twice_and_does_nothing_more(self) -> None:
        graph_module = MulToAdd()(MulToAdd()(traced()), expect=0)
        assert [(len(record.rewrites), record.changed) for record in history(graph_module)] == [(2, True), (0, False)]

    def test_cannot_be_reversed(self) -> None:
        graph_module = MulToAdd()(traced())
        before = node_rows(graph_module.graph)
        with pytest.raises(NotReversibleError, match="`mul-to-add` is not reversible") as caught:
            MulToAdd()(graph_module, reverse=True)  # type: ignore[arg-type]  # that is the point
        assert caught.value.pass_name == "mul-to-add"
        with pytest.raises(NotReversibleError, match="`mul-to-add` cannot be undone"):
            undo(graph_module)
        assert node_rows(graph_module.graph) == before


class TestReversiblePass:
    def test_there_and_back(self) -> None:
        graph_module, x = traced(), torch.randn(2, 3)
        before, expected = node_rows(graph_module.graph), graph_module(x)
        ScaleArgument()(graph_module, expect=1)
        assert len(graph_module.graph.nodes) == len(before) + 2
        assert torch.equal(graph_module(x), expected)
        ScaleArgument()(graph_module, reverse=True)
        assert node_rows(graph_module.graph) == before
        assert torch.equal(graph_module(x), expected)
        assert not any("fxopt" in node.meta for node in iter_nodes(graph_module.graph))
        assert [record.state for record in history(graph_module)] == ["undone"]


class TestOptions:
    def test_repr_makes_an_equal_pass(self) -> None:
        assert repr(Options(0.25, where="x")) == "Options(ratio=0.25, names=(), where='x')"
        assert eval(repr(MulToAdd())) == MulToAdd()
