"""What calls of modules do, and the questions that the analysis of a graph answers."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from site_passes import nodes_of
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, symbolic_trace

from fxopt_core import iter_nodes
from fxopt_rewrite import Effects

# modules


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x


def with_hook(module: nn.Module, kind: str) -> nn.Module:
    getattr(module, f"register_{kind}")(lambda *_: None)
    return module


def with_own_forward(module: nn.Module) -> nn.Module:
    module.__dict__["forward"] = lambda x: x
    return module


def module_call(module: nn.Module, *, keyword: bool = False) -> tuple[GraphModule, Effects, Node]:
    graph = Graph()
    x = graph.placeholder("x")
    node = graph.call_module("m", () if keyword else (x,), {"input": x} if keyword else {})
    graph.output(node)
    root = nn.Module()
    root.m = module
    graph_module = GraphModule(root, graph)
    return graph_module, Effects(graph_module), node


MODULES: list[tuple[nn.Module, str]] = [
    (nn.Linear(4, 4), ""),
    (nn.Conv2d(3, 3, 1), ""),
    (nn.BatchNorm2d(3), ""),
    (nn.LayerNorm(4), ""),
    (nn.ReLU(), ""),
    (nn.GELU(), ""),
    (nn.MaxPool2d(2), ""),
    (nn.AdaptiveAvgPool2d(1), ""),
    (nn.LSTM(4, 4), ""),
    (nn.ReLU(inplace=True), "wa"),
    (nn.SiLU(inplace=True), "wa"),
    (nn.Dropout(inplace=True), "wa"),
    (nn.Dropout(), "a"),
    (nn.Identity(), "a"),
    (nn.Flatten(), "a"),
    (nn.Sequential(), "wao"),
    (Opaque(), "wao"),
    (nn.TransformerEncoderLayer(4, 2), "wao"),
    (with_hook(nn.Linear(4, 4), "forward_hook"), "wao"),
    (with_hook(nn.Linear(4, 4), "forward_pre_hook"), "wao"),
    (with_hook(nn.Linear(4, 4), "full_backward_hook"), "wao"),
    (with_own_forward(nn.Linear(4, 4)), "wao"),
    (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "wao"),
    (symbolic_trace(nn.Linear(4, 4)), "wao"),
]


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize(("module", "expected"), MODULES)
def test_modules(module: nn.Module, expected: str, *, keyword: bool) -> None:
    _, effects, node = module_call(module, keyword=keyword)
    effect = effects.effect(node)
    found = ("w" if effect.writes else "") + ("a" if effect.aliases else "") + ("o" if effect.opaque else "")
    assert found == expected


def test_batch_norm_writes_its_statistics_in_train_mode_alone() -> None:
    norm = nn.BatchNorm1d(4)
    assert norm.running_mean is not None
    assert norm.num_batches_tracked is not None
    for written in (norm.running_mean, norm.running_var, norm.num_batches_tracked):
        assert written is not None
        assert module_call(norm.train())[1].tensor_written(written)
        assert not module_call(norm.eval())[1].tensor_written(written)
    assert not module_call(norm.train())[1].tensor_written(norm.weight)


def test_embedding_with_a_largest_norm_writes_its_weight() -> None:
    for module, expected in ((nn.Embedding(3, 4), False), (nn.Embedding(3, 4, max_norm=1.0), True)):
        assert module_call(module)[1].tensor_written(module.weight) is expected


def test_opaque_modules_may_write_what_they_own() -> None:
    module = Opaque()
    assert module_call(module)[1].tensor_written(module.inner.weight)
    assert module_call(nn.Sequential(nn.Linear(4, 4), module))[1].tensor_written(module.inner.weight)
    assert not module_call(nn.Linear(4, 4))[1].tensor_written(module.inner.weight)


def test_two_calls_of_an_opaque_module_may_share_its_state() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    one, two = graph.call_module("m", (x,)), graph.call_module("m", (y,))
    write = graph.call_method("add_", (two, 1))
    end = graph.output((one, write))
    root = nn.Module()
    root.m = Opaque()
    effects = Effects(GraphModule(root, graph))
    assert effects.written_between(one, two, end)


# parameters read by get_attr


def test_parameters_written_by_name_by_tie_and_through_views() -> None:
    root = nn.Module()
    root.weight = nn.Parameter(torch.zeros(4, 4))
    root.tied = root.weight
    root.register_buffer("part", root.weight.detach()[1:])
    root.register_buffer("sparse", torch.eye(2).to_sparse())
    root.other = nn.Parameter(torch.zeros(4))
    graph = Graph()
    part = graph.create_node("get_attr", "part")
    weight = graph.create_node("get_attr", "weight")
    other = graph.create_node("get_attr", "other")
    sparse = graph.create_node("get_attr", "sparse")
    view = graph.call_method("view", (part, -1))
    write = graph.call_method("zero_", (view,))
    end = graph.output((weight, other, sparse))
    graph_module = GraphModule(root, graph)
    effects = Effects(graph_module)
    assert effects.tensor_written(graph_module.get_parameter("weight"))
    assert effects.tensor_written(graph_module.get_buffer("part"))
    assert not effects.tensor_written(graph_module.get_parameter("other"))
    assert not effects.tensor_written(graph_module.get_buffer("sparse"))
    assert effects.written_between(weight, view, end)
    assert not effects.written_between(weight, write, end)
    assert not effects.written_between(other, weight, end)


def test_meta_parameters() -> None:
    with torch.device("meta"):
        norm = nn.BatchNorm1d(4)
    assert norm.running_mean is not None
    assert module_call(norm)[1].tensor_written(norm.running_mean)
    assert not module_call(norm)[1].tensor_written(norm.weight)


# written_between


def test_what_lies_between_counts() -> None:
    def forward(x: Tensor) -> Any:
        h = torch.relu(x)
        q = h.sin()
        h.add_(1)
        k = h.cos()
        return q, k, h.tan()

    graph_module = symbolic_trace(forward)
    effects, nodes = Effects(graph_module), nodes_of(graph_module)
    h, q, add, k, tan = (nodes[name] for name in ("relu", "sin", "add_", "cos", "tan"))
    assert effects.written_between(h, q, k)
    assert effects.written_between(h, k, q)
    assert effects.written_between(h, h, k)
    assert not effects.written_between(h, add, k)
    assert not effects.written_between(h, k, tan)
    assert not effects.written_between(h, q, add)
    assert not effects.written_between(nodes["x"], q, k)
    assert not effects.written_between(q, q, tan)


def test_containers_hold_what_is_put_in() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    h = graph.call_function(torch.relu, (x,))
    store = graph.call_function(builtins.dict, ())
    put = graph.call_function(operator.setitem, (store, "key", h))
    got = graph.call_function(operator.getitem, (store, "key"))
    graph.call_method("add_", (got, 1))
    end = graph.output(h)
    effects = Effects(GraphModule({}, graph))
    assert effects.written_between(h, put, end)


def test_residual_sums_are_fresh() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.one(x)
            y: Tensor = x + self.two(x)
            y.add_(1)
            return x * y

    graph_module = symbolic_trace(Block())
    effects, nodes = Effects(graph_module), nodes_of(graph_module)
    assert effects.aliases(nodes["add_1"]) == ()
    assert not effects.written_between(nodes["add"], nodes["add"], nodes["output"])
    assert effects.written_between(nodes["add_1"], nodes["add_1"], nodes["output"])


def test_inputs_may_be_one_tensor_as_soon_as_one_is_written() -> None:
    def reading(x: Tensor, y: Tensor) -> Any:
        return x.sin(), torch.relu(x).add_(1), y.cos()

    def writing(x: Tensor, y: Tensor) -> Any:
        return x.sin(), y[0].add_(1), x.cos()

    for function, expected in ((reading, False), (writing, True)):
        graph_module = symbolic_trace(function)
        effects, nodes = Effects(graph_module), nodes_of(graph_module)
        assert effects.written_between(nodes["x"], nodes["sin"], nodes["cos"]) is expected


def test_nodes_that_came_later() -> None:
    graph_module = symbolic_trace(lambda x: torch.relu(x))
    effects, nodes = Effects(graph_module), nodes_of(graph_module)
    with graph_module.graph.inserting_before(nodes["output"]):
        view = graph_module.graph.call_method("view", (nodes["relu"], -1))
        write = graph_module.graph.call_method("add_", (view, 1))
    assert effects.written_between(view, nodes["x"], nodes["output"])
    assert effects.written_between(nodes["relu"], write, nodes["output"])
    assert effects.writes(write) == (view,)
    assert effects.needs_own_memory(nodes["relu"])


def test_guards_of_an_export_write_nothing() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.view(-1) + y

    program = torch.export.export(Model(), (torch.zeros(2, 2), torch.zeros(4)))
    graph_module = program.module()
    assert isinstance(graph_module, GraphModule)
    effects = Effects(graph_module)
    assert not any(effects.writes(node) for node in iter_nodes(graph_module.graph))


def test_it_is_linear_in_a_hub_with_many_writers(steps_of: Callable[[Callable[[], object]], int]) -> None:
    def build(count: int) -> tuple[GraphModule, Node]:
        graph = Graph()
        hub = graph.call_function(torch.relu, (graph.placeholder("x"),))
        writes = [graph.call_method("add_", (graph.call_method("view", (hub, -1)), 1)) for _ in range(count)]
        graph.output(tuple(writes))
        return GraphModule({}, graph), hub

    def ask_everything(graph_module: GraphModule, hub: Node) -> None:
        nodes = list(iter_nodes(graph_module.graph))
        effects = Effects(graph_module)
        for node in nodes[2:]:
            effects.written_between(hub, node, nodes[-1])
            effects.needs_own_memory(node)

    def steps(count: int) -> int:
        graph_module, hub = build(count)
        return steps_of(lambda: ask_everything(graph_module, hub))

    steps(10)  # what is found out once is found out here
    assert steps(800) < 4.2 * steps(200)


def test_many_opaque_calls_do_not_walk_the_same_state_again_and_again(
    steps_of: Callable[[Callable[[], object]], int],
) -> None:
    def steps(modules: int, calls: int) -> int:
        root = nn.Module()
        root.m = nn.Sequential(*[Opaque() for _ in range(modules)])
        graph = Graph()
        x = graph.placeholder("x")
        for _ in range(calls):
            x = graph.call_module("m", (x,))
        graph.output(x)
        graph_module = GraphModule(root, graph)
        return steps_of(lambda: Effects(graph_module))

    steps(1, 1)  # what is found out once is found out here
    assert steps(100, 100) < 1.2 * (steps(100, 1) + steps(1, 100))
