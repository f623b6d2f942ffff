from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from site_passes import Computes, nodes_of
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Tracer, symbolic_trace

from fxopt_rewrite import GraphIndex


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.a.weight
        self.register_buffer("offset", torch.ones(2))

    def forward(self, x: Tensor) -> Any:
        return self.a(x) + self.offset


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.again = self.inner.a
        self.free = nn.Linear(2, 2)
        self.plain = torch.ones(2)

    def forward(self, x: Tensor) -> Any:
        y = self.inner.a(x) + F.linear(x, self.inner.a.weight) + F.linear(x, self.inner.a.weight)
        return self.free(y) + self.inner.offset + self.plain


def with_leaf(leaf: type[nn.Module], model: nn.Module) -> GraphModule:
    class Leaves(Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, leaf) or super().is_leaf_module(m, module_qualified_name)

    return GraphModule(model, Leaves().trace(model))


@pytest.fixture
def graph_module() -> GraphModule:
    model = Model()
    traced = GraphModule(model, symbolic_trace(model).graph)
    for name in ("again", "inner"):  # names that the graph does not use
        setattr(traced, name, getattr(model, name))
    return traced


class TestNames:
    def test_nodes_and_places(self, graph_module: GraphModule) -> None:
        index = GraphIndex(graph_module)
        assert [index.position[node] for node in index.nodes] == list(range(len(index.nodes)))
        assert index.nodes == tuple(graph_module.graph.nodes)

    def test_modules_stand_under_all_their_names(self, graph_module: GraphModule) -> None:
        index = GraphIndex(graph_module)
        module = graph_module.get_submodule("inner.a")
        assert sorted(index.module_names(module)) == ["again", "inner.a"]
        assert index.module_names(nn.ReLU()) == []

    def test_tensors_stand_under_all_their_names(self, graph_module: GraphModule) -> None:
        index = GraphIndex(graph_module)
        weight = graph_module.get_parameter("inner.a.weight")
        assert sorted(index.tensor_names(weight)) == ["again.weight", "inner.a.weight", "inner.tied.weight"]
        assert index.tensor_names(torch.ones(2)) == []
        assert index.tensor_names(graph_module.get_buffer("inner.offset")) == ["inner.offset"]

    def test_what_nodes_name(self, graph_module: GraphModule) -> None:
        index, nodes = GraphIndex(graph_module), nodes_of(graph_module)
        assert index.module_of(nodes["free"]) is graph_module.free
        assert index.module_of(nodes["x"]) is None
        assert index.tensor_of(nodes["inner_a_weight"]) is graph_module.get_parameter("inner.a.weight")
        assert index.tensor_of(nodes["free"]) is None
        assert index.attribute_nodes("inner.offset") == [nodes["inner_offset"]]
        assert index.attribute_nodes("nothing") == []

    def test_names_of_nothing(self) -> None:
        module = GraphModule(nn.Module(), Graph())
        nodes = [module.graph.create_node("get_attr", name) for name in ("missing.weight", "missing")]
        assert [GraphIndex(module).tensor_of(node) for node in nodes] == [None, None]


class TestTies:
    def test_by_name(self, graph_module: GraphModule) -> None:
        index = GraphIndex(graph_module)
        assert index.is_tied(graph_module.get_parameter("inner.a.weight"))
        assert not index.is_tied(graph_module.get_parameter("free.weight"))

    @pytest.mark.parametrize(
        ("one", "other", "tied"),
        [
            (lambda flat: flat[:4], lambda flat: flat[2:6], True),
            (lambda flat: flat[:4], lambda flat: flat[4:], False),
            (lambda flat: flat, lambda flat: flat[3:4], True),
            (lambda flat: flat[:0], lambda flat: flat, False),
            (lambda flat: flat.view(4, 2)[:, 0], lambda flat: flat.view(4, 2)[:, 1], True),
        ],
        ids=["overlapping", "side by side", "inside", "empty", "interleaved"],
    )
    def test_by_memory(self, one: object, other: object, tied: bool) -> None:
        assert callable(one)
        assert callable(other)
        flat, module = torch.zeros(8), nn.Module()
        module.one, module.other = nn.Parameter(one(flat)), nn.Parameter(other(flat))
        module.third = nn.Parameter(torch.zeros(3))
        index = GraphIndex(GraphModule(module, Graph()))
        for name in ("one", "other"):
            index.graph_module.register_parameter(name, getattr(module, name))
        index = GraphIndex(index.graph_module)
        assert [index.is_tied(module.one), index.is_tied(module.other)] == [tied, tied]

    def test_meta_tensors_share_nothing(self) -> None:
        module = symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to("meta"))
        index = GraphIndex(module)
        assert not any(index.is_tied(parameter) for parameter in module.parameters())


class TestReaders:
    def test_calls_and_users_of_attributes(self, graph_module: GraphModule) -> None:
        index, nodes = GraphIndex(graph_module), nodes_of(graph_module)
        weight = graph_module.get_parameter("inner.a.weight")
        assert list(index.readers(weight)) == [nodes["inner_a"], nodes["linear"], nodes["linear_1"]]
        assert list(index.readers(graph_module.get_parameter("inner.a.bias"))) == [nodes["inner_a"]]
        assert not index.readers(torch.ones(1))

    def test_opaque_modules_read_what_they_hold(self) -> None:
        graph_module: Any = with_leaf(Inner, Computes(lambda m, x: m.inner(x) + m.inner.a(x), inner=Inner()))
        index, nodes = GraphIndex(graph_module), nodes_of(graph_module)
        assert set(index.readers(graph_module.inner.a.weight)) == {nodes["inner"], nodes["inner_a"]}
        assert set(index.readers(graph_module.inner.offset)) == {nodes["inner"]}


class TestTraining:
    @pytest.mark.parametrize("training", [True, False])
    def test_export_graphs_say_so_themselves(self, training: bool) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).train(training)
        graph_module = torch.export.export(model, (torch.randn(3, 2),)).module()
        assert isinstance(graph_module, GraphModule)
        assert GraphIndex(graph_module).training is training

    def test_other_graphs_do_not(self) -> None:
        assert not GraphIndex(symbolic_trace(nn.Sequential(nn.Dropout(0.5)).train())).training


def test_hubs_cost_no_more_than_their_users(steps_of: Callable[[Callable[[], object]], int]) -> None:
    """One parameter, one value and one module with many users each."""

    class Hub(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.count, self.linear = count, nn.Linear(2, 2)

        def forward(self, x: Tensor) -> list[Tensor]:
            return [f(x) for _ in range(self.count) for f in (self.linear, lambda x: F.linear(x, self.linear.weight))]

    def ask_everything(graph_module: Any, count: int) -> None:
        index = GraphIndex(graph_module)
        for node in index.nodes:
            for parameter in graph_module.parameters():
                index.readers(parameter)
                index.is_tied(parameter)
            index.tensor_of(node)
        assert len(index.readers(graph_module.linear.weight)) == 2 * count

    def steps(count: int) -> int:
        graph_module = symbolic_trace(Hub(count))
        return steps_of(lambda: ask_everything(graph_module, count))

    steps(10)  # what is found out once is found out here
    assert steps(800) < 4.2 * steps(200)
