"""One operation in any form of graph: what counts as a call of it, and what a pass is told that looks for one form."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from site_passes import exported
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_core import (
    PreconditionError,
    iter_nodes,
)
from fxopt_rewrite import calls_of, is_call, operands_of

Form = Callable[[nn.Module, tuple[Tensor, ...]], GraphModule]


class FunctionTracer(torch.fx.Tracer):
    """Goes into torch's modules, too."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


def functions(model: nn.Module, inputs: tuple[Tensor, ...]) -> GraphModule:
    return GraphModule(model, FunctionTracer().trace(model))


FORMS: dict[str, Form] = {
    "traced": lambda model, inputs: torch.fx.symbolic_trace(model),
    "functions": functions,
    "aten": lambda model, inputs: exported(model, *inputs),
}
INPUTS = (torch.rand(3, 3) + 0.5, torch.rand(3, 3) + 0.5)


class Of(nn.Module):
    """A model of one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x, y)


SAME: dict[str, tuple[list[Any], list[Callable[..., Any]]]] = {
    "mul": (
        [operator.mul, torch.mul, torch.multiply, torch.Tensor.mul, torch.ops.aten.mul, torch.ops.aten.mul.Tensor],
        [lambda x, y: x * y, lambda x, y: 2 * x, lambda x, y: torch.mul(x, other=y), lambda x, y: x.multiply(y)],
    ),
    "relu": (
        [F.relu, torch.relu, torch.Tensor.relu, nn.ReLU, torch.ops.aten.relu.default],
        [lambda x, y: F.relu(x), lambda x, y: x.relu(), nn.ReLU()],
    ),
}

OTHERS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "in place": (operator.mul, lambda x, y: x.clone().mul_(y)),
    "in place by an argument": (F.relu, lambda x, y: F.relu(x.clone(), inplace=True)),
    "in place by a position": (torch.relu, lambda x, y: F.relu(x.clone(), True)),
    "an in-place module": (nn.ReLU, lambda x, y: nn.functional.relu_(x.clone())),
    "into another tensor": (torch.mul, lambda x, y: torch.mul(x, y, out=y.clone())),
    "rounding": (operator.truediv, lambda x, y: torch.div(x, y, rounding_mode="floor")),
    "a factor": (operator.add, lambda x, y: torch.add(x, y, alpha=2)),
    "exchanged operands": (torch.sub, lambda x, y: torch.rsub(x, y)),
    "a list": (torch.concat, lambda x, y: torch.stack(list(operator.concat([x], [y])))),
    "another operation": (operator.mul, lambda x, y: torch.dot(x[0], y[0])),
}


def graph_of(function: Callable[..., Any], form: str) -> GraphModule:
    model = function if isinstance(function, nn.Module) else None
    if model is not None:
        function = nn.Sequential(model)
        inputs: tuple[Tensor, ...] = INPUTS[:1]
        return FORMS[form](function, inputs)
    return FORMS[form](Of(function), INPUTS)


class TestCalls:
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("name", SAME)
    def test_all_spellings_are_one_operation(self, name: str, form: str) -> None:
        asked, spellings = SAME[name]
        for function in spellings:
            graph_module = graph_of(function, form)
            for operation in asked:
                assert len(calls_of(graph_module, operation)) == 1, graph_module.code
            assert not calls_of(graph_module, torch.sin)

    @pytest.mark.parametrize("what", OTHERS)
    def test_what_does_more_or_something_else_is_none(self, what: str) -> None:
        operation, function = OTHERS[what]
        graph_module = graph_of(function, "traced")
        assert not calls_of(graph_module, operation), graph_module.code

    def test_modules_that_only_look_like_one(self) -> None:
        class Leaky(nn.ReLU):
            pass

        hooked, patched = nn.ReLU(), nn.ReLU()
        hooked.register_forward_hook(lambda *args: None)
        patched.forward = torch.sin  # type: ignore[method-assign]
        Leaky.__module__ = "torch.nn.modules.activation"  # so that it is traced as a leaf
        model = nn.Sequential(nn.ReLU(), nn.ReLU(inplace=True), hooked, patched, Leaky())
        assert [str(node.target) for node in calls_of(torch.fx.symbolic_trace(model), nn.ReLU)] == ["0"]

    def test_functions_that_torch_does_not_have_are_themselves_alone(self) -> None:
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        mine, theirs = graph.call_function(len, (x,)), graph.call_function(sorted, (x,))
        assert is_call(mine, len) and not is_call(theirs, len)
        root = graph.call_function(math.sqrt, (x,))  # of numbers, not of tensors
        assert not is_call(root, torch.sqrt) and is_call(root, math.sqrt)

    def test_graphs_that_call_classes_and_objects_can_be_searched(self) -> None:
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        for target in (slice, float, torch.Size):
            graph.create_node("call_function", target, (x,), name="called")
        product = graph.call_function(operator.mul, (x, x))
        graph.output(product)
        assert calls_of(GraphModule(nn.Module(), graph), operator.mul) == [product]

    def test_in_place_forms_can_be_asked_for(self) -> None:
        graph_module = graph_of(lambda x, y: x.clone().mul_(y), "traced")
        assert len(calls_of(graph_module, torch.Tensor.mul_)) == 1

    def test_several_operations_in_the_order_of_the_graph(self) -> None:
        graph_module = graph_of(lambda x, y: (x + y) * x - y, "aten")
        assert [node.name for node in calls_of(graph_module, torch.sub, operator.add)] == ["add", "sub"]
        assert [is_call(node, operator.mul) for node in iter_nodes(graph_module.graph)].count(True) == 1

    @pytest.mark.parametrize("wrong", ["mul", nn.ReLU(), nn.Linear, None, torch.ones(1)])
    def test_what_is_no_operation_is_refused(self, wrong: Any) -> None:
        with pytest.raises(TypeError, match=r"expected an operation, such as operator\.mul.*read_linear"):
            calls_of(graph_of(lambda x, y: x * y, "traced"), wrong)

    def test_it_needs_a_graph_module(self) -> None:
        with pytest.raises(PreconditionError, match="calls_of is given a ReLU"):
            calls_of(nn.ReLU(), operator.mul)  # type: ignore[arg-type]

    def test_operands_by_position_and_by_name(self) -> None:
        graph = torch.fx.Graph()
        x, y = graph.placeholder("x"), graph.placeholder("y")
        for call in (
            graph.call_function(operator.mul, (x, y)),
            graph.call_function(torch.mul, (x,), {"other": y}),
            graph.call_function(torch.mul, (), {"other": y, "input": x}),
            graph.call_function(torch.ops.aten.mul.Tensor, (), {"self": x, "other": y}),
            graph.call_method("pow", (x,), {"exponent": y}),
            graph.call_method("add", (x, y), {"alpha": 1}),
        ):
            assert operands_of(call) == (x, y)
        assert operands_of(graph.call_method("neg", (x,))) == (x,)
