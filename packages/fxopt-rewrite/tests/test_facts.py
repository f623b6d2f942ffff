from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from site_passes import exported, nodes_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.passes.shape_prop import ShapeProp

from fxopt_core import iter_nodes
from fxopt_rewrite import (
    TensorFacts,
    infer_shapes,
    is_python_number,
    same_size,
    tensor_facts,
)


def output_of(graph_module: GraphModule) -> Node:
    node = list(iter_nodes(graph_module.graph))[-1].args[0]
    assert isinstance(node, Node)
    return node


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)
        self.drop = nn.Dropout()

    def forward(self, x: Tensor, scale: float = 2.0) -> Any:
        hidden: Tensor = self.norm(self.conv(x)).mean((2, 3)) * scale
        return self.drop(self.head(hidden))


def weight_of(graph_module: GraphModule) -> Tensor:
    return graph_module.get_parameter("head.weight")


# tensor_facts


def test_facts_from_val() -> None:
    graph_module = infer_shapes(symbolic_trace(Net().eval()), torch.zeros(2, 3, 8, 8))
    facts = tensor_facts(nodes_of(graph_module)["conv"])
    assert facts == TensorFacts((2, 4, 6, 6), torch.float32, torch.device("cpu"), (144, 36, 6, 1), proven=False)
    assert facts is not None
    assert facts.rank == 4


def test_facts_from_shape_prop() -> None:
    graph_module = symbolic_trace(Net().eval())
    ShapeProp(graph_module).propagate(torch.zeros(2, 3, 8, 8))
    facts = tensor_facts(nodes_of(graph_module)["head"], weight_of(graph_module))
    assert facts == TensorFacts((2, 5), torch.float32, None, (5, 1))


def test_facts_absent() -> None:
    graph_module = symbolic_trace(Net().eval())
    assert all(tensor_facts(node) is None for node in iter_nodes(graph_module.graph))
    infer_shapes(graph_module, torch.zeros(2, 3, 8, 8))
    assert tensor_facts(nodes_of(graph_module)["scale"]) is None


@pytest.mark.parametrize("change", ["half", "double", "bfloat16"])
def test_stale_facts_count_as_unknown(change: str) -> None:
    graph_module = infer_shapes(symbolic_trace(Net().eval()), torch.zeros(2, 3, 8, 8))
    node = nodes_of(graph_module)["head"]
    assert tensor_facts(node, weight_of(graph_module)) is not None
    getattr(graph_module, change)()
    assert tensor_facts(node, weight_of(graph_module)) is None
    assert tensor_facts(node) is not None


def test_meta_contradicts_no_device_and_others_do() -> None:
    node = Graph().placeholder("x")
    node.meta["val"] = torch.empty(2, 3, device="meta")
    assert tensor_facts(node, torch.zeros(1)) is not None
    with FakeTensorMode() as mode:
        node.meta["val"] = torch.empty(2, 3, device="cuda")
    assert mode is not None
    assert tensor_facts(node, torch.zeros(1)) is None
    assert tensor_facts(node, torch.empty(1, device="meta")) is not None


def test_newer_tensor_meta_stands_in_for_a_stale_val() -> None:
    graph_module = infer_shapes(symbolic_trace(Net().eval()), torch.zeros(2, 3, 8, 8)).double()
    ShapeProp(graph_module).propagate(torch.zeros(4, 3, 8, 8, dtype=torch.double))
    facts = tensor_facts(nodes_of(graph_module)["head"], weight_of(graph_module))
    assert facts is not None
    assert (facts.shape, facts.dtype) == ((4, 5), torch.float64)


def test_sparse_tensors_have_no_strides() -> None:
    node = Graph().placeholder("x")
    node.meta["val"] = torch.eye(3).to_sparse()
    facts = tensor_facts(node)
    assert facts is not None
    assert facts.stride is None


def test_sizes_of_an_export_are_proven() -> None:
    graph_module = exported(nn.Linear(4, 2), torch.zeros(3, 4))
    facts = tensor_facts(nodes_of(graph_module)["linear"])
    assert facts is not None
    assert facts.proven
    assert facts.shape == (3, 2)


# same_size


def symbols(*sizes: int) -> list[torch.SymInt]:
    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))
    context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext([DimDynamic.DYNAMIC] * len(sizes))
    fake = mode.from_tensor(torch.empty(sizes, device="meta"), symbolic_context=context)
    return [cast("torch.SymInt", size) for size in fake.shape]


def test_same_size_by_expression_and_without_guards() -> None:
    a, b = symbols(8, 8)
    guards = a.node.shape_env.guards
    before = len(guards)
    assert same_size(a, a)
    assert same_size(a * 2, 2 * a)
    assert not same_size(a, b)
    assert not same_size(a, 8)
    assert not same_size(8, a)
    assert len(guards) == before
    assert a == 8  # adds the guard that the size is 8
    assert same_size(a, 8)


# is_python_number


KINDS: dict[bool | None, list[Callable[[Any], object]]] = {
    True: [
        lambda x: x.size(0),
        lambda x: x.size(dim=0),
        lambda x: x.size()[1],
        lambda x: x.shape[-1],
        lambda x: x.shape[1:][0],
        lambda x: operator.add(x.size()[:-1], (3, 4))[0],
        lambda x: x.dim(),
        lambda x: x.ndim,
        lambda x: x.numel(),
        lambda x: x.item(),
        lambda x: x.stride(0),
        lambda x: x.shape[0] / 49 // 1,
        lambda x: -(x.shape[0] + x.size(1)) * 2,
        lambda x: x.size(-1) ** 0.5,
        lambda x: x.size(0) == x.size(1),
        lambda x: torch.relu(x).shape[0],
        lambda x: x.element_size(),
    ],
    False: [
        lambda x: torch.relu(x),
        lambda x: F.softmax(x, -1),
        lambda x: F.relu(x, inplace=True),
        lambda x: F.max_pool1d(x, 2),
        lambda x: torch.relu(x) / 2,
        lambda x: torch.relu(x).shape[0] / torch.relu(x),
        lambda x: torch.relu(x)[0],
        lambda x: torch.chunk(x, 2)[0],
        lambda x: x.split(2)[1],
        lambda x: x.float(),
        lambda x: x.view(2, -1).t(),
        lambda x: x.sum(),
        lambda x: torch.relu(x).T,
        lambda x: torch.ops.aten.add.Tensor(x, 1),
        lambda x: torch.linalg.norm(x),
        lambda x: abs(torch.relu(x)),
    ],
    None: [
        lambda x: x,
        lambda x: x / 2,
        lambda x: x[0],
        lambda x: x.shape,
        lambda x: x.dtype,
        lambda x: x.frobnicate(),
        lambda x: x.chunk(2),
        lambda x: x.logits,
        lambda x: F.max_pool1d(x, 2, return_indices=True),
    ],
}


@pytest.mark.parametrize(("function", "number"), [(f, number) for number, some in KINDS.items() for f in some])
def test_whether_a_value_is_a_number_is_known_or_left_open(function: Any, number: bool | None) -> None:
    assert is_python_number(output_of(symbolic_trace(function))) is number


def test_python_functions() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    size = graph.call_method("size", (x, 0))
    length = graph.call_function(builtins.len, (x,))
    root = graph.call_function(math.sqrt, (size,))
    smaller = graph.call_function(builtins.min, (size, 4))
    tensor = graph.call_function(torch.relu, (x,))
    unclear = graph.call_function(builtins.max, (tensor, size))
    assert is_python_number(graph.call_function(torch.tensor, (size,))) is False
    assert is_python_number(graph.call_function(cast("Callable[..., object]", torch.sym_int), (size,))) is True
    symbol = graph.call_function(torch.ops.aten.sym_size.int, (x, 0))
    sizes = graph.call_method("size", (x,))
    items = [
        graph.call_function(operator.getitem, (holder, 0))
        for holder in (
            graph.call_function(builtins.tuple, (sizes,)),
            graph.call_function(builtins.list, (sizes,)),
            graph.call_function(builtins.divmod, (size, 3)),
        )
    ]
    ends = [graph.call_function(function, (sizes,)) for function in (builtins.max, builtins.sum)]
    numbers = (length, root, smaller, symbol, *items, *ends)
    assert [is_python_number(node) for node in (*numbers, unclear)] == [True] * len(numbers) + [None]


def test_modules_and_attributes() -> None:
    root = nn.Module()
    root.linear, root.lstm, root.identity = nn.Linear(2, 2), nn.LSTM(2, 2), nn.Identity()
    root.pool, root.own = nn.MaxPool1d(2), Net()
    root.weight = nn.Parameter(torch.ones(2))
    root.__dict__["factor"] = 3
    graph = Graph()
    x = graph.placeholder("x")
    linear = graph.call_module("linear", (x,))
    nodes = [
        linear,
        graph.call_module("lstm", (x,)),
        graph.call_module("identity", (linear,)),
        graph.call_module("identity", (x,)),
        graph.call_module("pool", (x,)),
        graph.call_module("own", (x,)),
        graph.get_attr("weight"),
        graph.get_attr("factor"),
    ]
    graph.output(tuple(nodes))
    GraphModule(root, graph)
    assert [is_python_number(node) for node in nodes] == [False, None, False, None, False, None, False, True]


def test_meta_decides_first() -> None:
    node = Graph().placeholder("x")
    for value, expected in ((torch.zeros(1), False), (3, True), (2.5, True), (symbols(8)[0], True), ((1, 2), None)):
        node.meta["val"] = value
        assert is_python_number(node) is expected
    graph_module = symbolic_trace(lambda x: x / 2)
    ShapeProp(graph_module).propagate(torch.zeros(3))
    assert is_python_number(output_of(graph_module)) is False


def test_long_chains_end() -> None:
    graph = Graph()
    x = value = graph.placeholder("x")
    for _ in range(5000):
        value = graph.call_function(operator.add, (value, 1))
    assert is_python_number(value) is None
    value = x
    for _ in range(5000):
        value = graph.call_function(operator.add, (value, graph.call_function(torch.relu, (value,))))
    assert is_python_number(value) is False
