from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from site_passes import Conv1D
from torch import Tensor, nn
from torch.fx import GraphModule, Node, Tracer, symbolic_trace

from fxopt_core import iter_nodes
from fxopt_rewrite import GraphIndex, LinearCall, Obstacle, input_of, read_linear

Call = Callable[[Any, Tensor], Tensor]


class Layer(nn.Module):
    """Parameters of a layer from 3 to 5 features, either way round, and whatever is computed of them."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(5))
        self.usual = nn.Parameter(torch.randn(5, 3))
        self.vector, self.one = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(1))
        self.stack = nn.Parameter(torch.randn(2, 3, 5))
        self.wide = nn.Parameter(torch.randn(2, 5))
        self.expanded = nn.Parameter(torch.randn(1, 3).expand(5, 3))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def views(graph_module: GraphModule, transposed: bool = True) -> list[LinearCall | Obstacle]:
    index = GraphIndex(graph_module)
    found = (read_linear(index, node, transposed=transposed) for node in iter_nodes(graph_module.graph))
    return [view for view in found if view is not None]


def traced(call: Call) -> GraphModule:
    return symbolic_trace(Layer(call))


def exported(call: Call) -> GraphModule:
    graph_module: GraphModule = torch.export.export(Layer(call), (torch.randn(2, 3),)).module()
    return graph_module


RIGHT: dict[str, Call] = {
    "addmm": lambda m, x: torch.addmm(m.bias, x, m.weight),
    "addmm by keyword": lambda m, x: torch.addmm(input=m.bias, mat1=x, mat2=m.weight, beta=1, alpha=1),
    "addmm of the bias": lambda m, x: m.bias.addmm(x, m.weight),
    "mm": lambda m, x: torch.mm(x, m.weight),
    "mm by keyword": lambda m, x: torch.mm(x, mat2=m.weight),
    "method mm": lambda m, x: x.mm(m.weight),
    "matmul": lambda m, x: torch.matmul(x, m.weight),
    "matmul by keyword": lambda m, x: torch.matmul(input=x, other=m.weight),
    "method matmul": lambda m, x: x.matmul(m.weight),
    "operator": lambda m, x: operator.matmul(x, m.weight),
}


@pytest.mark.parametrize("graph", [traced, exported])
@pytest.mark.parametrize("name", RIGHT)
def test_products_with_a_parameter_on_the_right(name: str, graph: Callable[[Call], GraphModule]) -> None:
    graph_module = graph(RIGHT[name])
    (view,) = views(graph_module)
    assert isinstance(view, LinearCall)
    assert (view.transposed, view.in_features, view.out_features) == (True, 3, 5)
    assert (view.bias is None) == ("addmm" not in name)
    assert view.input.op == "placeholder"
    assert input_of(view.node) is view.input
    assert torch.equal(view.matrix, view.weight.tensor.t())
    assert not view.matrix.requires_grad
    (plain,) = views(graph_module, transposed=False)
    assert isinstance(plain, Obstacle)
    assert (plain.reason, "`weight` of shape (3, 5) is stored as (in, out)" in plain.message) == (
        "transposed-weight",
        True,
    )


NO_LAYERS: dict[str, Call] = {
    "product of values": lambda m, x: x @ x.t(),
    "parameter on the left": lambda m, x: m.usual @ x.t(),
    "matrix times vector": lambda m, x: x @ m.vector,
    "batched weights": lambda m, x: torch.matmul(x, m.stack),
    "batched product": lambda m, x: torch.bmm(x.expand(2, 2, 3), m.stack),
    "einsum": lambda m, x: torch.einsum("bi,io->bo", x, m.weight),
    "transposed on the way": lambda m, x: x @ m.usual.t(),
    "baddbmm": lambda m, x: torch.baddbmm(m.bias, x.expand(2, 2, 3), m.stack),
    "reflected": lambda m, x: operator.matmul(m.usual, x.t()),
}


@pytest.mark.parametrize("name", NO_LAYERS)
def test_what_is_no_layer(name: str) -> None:
    assert views(traced(NO_LAYERS[name])) == []


ODD: dict[str, tuple[Call, str, str]] = {
    "alpha": (lambda m, x: torch.addmm(m.bias, x, m.weight, alpha=2), "unsupported-call", "is given alpha=2"),
    "beta": (lambda m, x: torch.addmm(m.bias, x, m.weight, beta=0), "unsupported-call", "is given beta=0"),
    "out": (lambda m, x: torch.mm(x, m.weight, out=x), "unsupported-call", "is given out=x"),
    "wide bias": (lambda m, x: torch.addmm(m.wide, x, m.weight), "unsupported-call", "has shape (2, 5), expected (5,)"),
    "one bias": (lambda m, x: torch.addmm(m.one, x, m.weight), "unsupported-call", "has shape (1,), expected (5,)"),
    "computed": (lambda m, x: torch.addmm(m.bias, x, m.usual.t()), "computed-weight", "that `t` computes"),
    "linear of a vector": (lambda m, x: F.linear(x, m.vector), "unsupported-call", "`vector` has shape (3,)"),
    "linear with one bias": (lambda m, x: F.linear(x, m.usual, m.one), "unsupported-call", "expected (5,)"),
    "expanded parameter": (
        lambda m, x: F.linear(x, m.expanded),
        "tied-parameter",
        "is expanded, so that its elements share memory",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_calls_are_obstacles(name: str) -> None:
    call, reason, message = ODD[name]
    (view,) = views(traced(call))
    assert isinstance(view, Obstacle)
    assert (view.reason, message in view.message) == (reason, True), view.message


def test_a_computed_weight_is_that_of_the_module_which_runs() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(3, 5))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)  # type: ignore[no-any-return]  # a module gives a tensor here

    graph_module: GraphModule = torch.export.export(Inside().eval(), (torch.randn(2, 3),), strict=False).module()
    (view,) = views(graph_module)
    assert isinstance(view, Obstacle)
    assert (view.site, view.reason) == ("inner", "computed-weight")


class Leaves(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Conv1D)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the class of these tests be that of transformers."""
    module = types.ModuleType("transformers.pytorch_utils")
    module.Conv1D = Conv1D  # type: ignore[attr-defined]  # a module made for the test
    monkeypatch.setitem(sys.modules, "transformers.pytorch_utils", module)


def leaf(layer: nn.Module) -> tuple[GraphModule, Node]:
    model = nn.Sequential(layer)
    graph_module = GraphModule(model, Leaves().trace(model))
    return graph_module, next(node for node in iter_nodes(graph_module.graph) if node.op == "call_module")


class TestConv1DAsALeaf:
    def test_it_is_a_transposed_layer(self, known: None) -> None:
        graph_module, node = leaf(Conv1D(5, 3))
        (view,) = views(graph_module)
        assert isinstance(view, LinearCall)
        assert (view.label, view.transposed, view.in_features, view.out_features) == ("0", True, 3, 5)
        assert input_of(node) is view.input
        assert not GraphIndex(graph_module).effects.effect(node).opaque

    def test_by_keyword(self, known: None) -> None:
        graph_module, node = leaf(Conv1D(5, 3))
        node.kwargs, node.args = {"x": node.args[0]}, ()
        (view,) = views(graph_module)
        assert isinstance(view, LinearCall)
        assert input_of(node) is view.input

    def test_without_transformers_it_is_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "transformers.pytorch_utils", raising=False)
        assert views(leaf(Conv1D(5, 3))[0]) == []

    def test_subclasses_and_changed_layers_are_obstacles(self, known: None) -> None:
        class Sub(Conv1D):
            pass

        layer, narrow = Conv1D(5, 3), Conv1D(5, 3)
        layer.register_forward_hook(lambda *_: None)
        narrow.nf = 4
        found = [views(leaf(odd)[0])[0] for odd in (Sub(5, 3), layer, narrow)]
        assert [view.reason for view in found if isinstance(view, Obstacle)] == [
            "subclass", "hooks", "unsupported-call"
        ]  # fmt: skip
