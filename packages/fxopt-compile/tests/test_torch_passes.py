"""Transformations as passes of torch's PassManager and of inductor."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from site_passes import Called
from torch import nn
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_manager import PassManager, this_before_that_pass_constraint

from fxopt_compile import as_inductor_pass, as_pass_base
from fxopt_compile.torch_passes import TransformationPass
from fxopt_core import (
    DeepCopy,
    PassError,
    PostconditionError,
    PreconditionError,
    Transformation,
    compose,
    history,
    iter_nodes,
)


class Swap(Transformation):
    """``x * y`` -> ``x + y``."""

    def __init__(self, *, source: str = "mul", target: str = "add") -> None:
        self.source, self.target = source, target

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in iter_nodes(graph_module.graph):
            if node.target is getattr(operator, self.source):
                node.target = getattr(operator, self.target)
                self.mark_as_transformed(node)
        return graph_module


class Breaks(Swap):
    """Changes everything, then raises."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        super().transform(graph_module)
        graph_module.graph.erase_node(graph_module.graph.output_node())
        raise ValueError("half done")


class CallsAModule(Transformation):
    """Puts a module into the graph."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph_module.add_module("relu", nn.ReLU())
        output = graph_module.graph.output_node()
        with graph_module.graph.inserting_before(output):
            node = graph_module.graph.call_module("relu", (output.all_input_nodes[0],))
        output.args = (node,)
        return graph_module


def traced() -> GraphModule:
    return torch.fx.symbolic_trace(Called(lambda x: x * 3.0 - 1.0))


class TestPassBase:
    def test_in_a_manager(self) -> None:
        graph_module = traced()
        result = PassManager([as_pass_base(Swap()), as_pass_base(Swap(source="sub"))])(graph_module)
        assert result.graph_module is graph_module
        assert result.modified
        assert graph_module(torch.tensor(4.0)) == 8.0
        assert [record.pass_name for record in history(graph_module)] == ["swap", "swap"]

    def test_modified_is_told_truly(self) -> None:
        graph_module = traced()
        ran: list[int] = []

        class Counts(TransformationPass):
            def call(self, graph_module: GraphModule) -> Any:
                ran.append(0)
                return super().call(graph_module)

        assert PassManager([Counts(Swap())], steps=9)(graph_module).modified
        assert len(ran) == 2
        assert not as_pass_base(Swap())(graph_module).modified  # type: ignore[union-attr]  # torch says it may be None

    def test_constraints_follow_equality(self) -> None:
        first, last = Swap(), Swap(source="add", target="sub")
        constraint = this_before_that_pass_constraint(as_pass_base(Swap()), as_pass_base(last))
        manager = PassManager([as_pass_base(last), as_pass_base(first)], [constraint])
        manager(traced())
        assert manager.passes == [as_pass_base(first), as_pass_base(last)]
        assert as_pass_base(first) != first

    def test_wrong_arguments(self) -> None:
        with pytest.raises(PreconditionError, match=r"is <class .*Swap'>, expected an instance"):
            as_pass_base(Swap)  # type: ignore[arg-type]  # that is the test
        with pytest.raises(PreconditionError, match="expected"):
            as_pass_base(Swap())(nn.ReLU())  # type: ignore[arg-type]  # that is the test


class TestInductorPass:
    def test_edits_the_graph_and_leaves_no_trace(self) -> None:
        graph_module, adapted = traced(), as_inductor_pass(Swap())
        keys = set(vars(type(graph_module)))
        adapted(graph_module.graph)
        assert graph_module(torch.tensor(4.0)) == 6.0
        assert "fxopt" not in graph_module.meta
        assert all("fxopt" not in node.meta for node in iter_nodes(graph_module.graph))
        assert set(vars(type(graph_module))) == keys
        assert [(record.pass_name, len(record.rewrites)) for record in adapted.records] == [("swap", 1)]

    def test_traces_from_before_stay(self) -> None:
        graph_module = Swap()(traced())
        before = graph_module.meta["fxopt"], [node.meta.get("fxopt") for node in iter_nodes(graph_module.graph)]
        as_inductor_pass(Swap(source="sub"))(graph_module.graph)
        assert (graph_module.meta["fxopt"], [n.meta.get("fxopt") for n in iter_nodes(graph_module.graph)]) == before

    def test_an_error_leaves_nothing_half_done(self) -> None:
        graph_module, code = traced(), traced().code
        adapted = as_inductor_pass(Breaks())
        with pytest.raises(PassError, match="half done"):
            adapted(graph_module.graph)
        graph_module.recompile()
        assert graph_module.code == code
        assert adapted.records == []

    @pytest.mark.parametrize("copies", [DeepCopy(), compose(Swap(), inplace=False)])
    def test_another_graph_module_is_an_error(self, copies: Transformation) -> None:
        graph_module, code = traced(), traced().code
        with pytest.raises(PostconditionError, match="omit what copies"):
            as_inductor_pass(compose(Swap(), copies))(graph_module.graph)
        graph_module.recompile()
        assert graph_module.code == code

    def test_a_module_in_a_graph_of_functions_is_an_error(self) -> None:
        graph_module, code = traced(), traced().code
        with pytest.raises(PostconditionError, match="calls module relu; inductor's graphs call only functions"):
            as_inductor_pass(CallsAModule())(graph_module.graph)
        assert graph_module.code == code
        assert not dict(graph_module.named_children())

    def test_uuid(self) -> None:
        assert as_inductor_pass(Swap()).uuid() == Swap().uuid()
        assert as_inductor_pass(Swap(source="sub")).uuid() != Swap().uuid()
        assert as_inductor_pass(compose(Swap(), Swap())).uuid()

        class Unstable(Swap):
            def __init__(self, *, function: Any = None) -> None: ...

        assert as_inductor_pass(Unstable(function=lambda: None)).uuid() is None
