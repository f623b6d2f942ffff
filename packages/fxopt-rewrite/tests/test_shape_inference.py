from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from site_passes import Called, exported, nodes_of
from test_facts import Net, output_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fxopt_core import iter_nodes
from fxopt_core.errors import PreconditionError
from fxopt_rewrite import (
    infer_shapes,
    same_size,
    tensor_facts,
)


def shapes(graph_module: GraphModule) -> list[object]:
    return [
        tuple(value.shape) if isinstance(value := node.meta.get("val"), Tensor) else value
        for node in iter_nodes(graph_module.graph)
    ]


def test_module_graph() -> None:
    graph_module = symbolic_trace(Net())
    assert infer_shapes(graph_module, torch.zeros(2, 3, 8, 8)) is graph_module
    expected = [(2, 3, 8, 8), 2.0, (2, 4, 6, 6), (2, 4, 6, 6), (2, 4), (2, 4), (2, 5), (2, 5), (2, 5)]
    assert shapes(graph_module) == expected
    assert all(isinstance(node.meta["val"], (FakeTensor, float)) for node in iter_nodes(graph_module.graph))


def test_arguments_by_name_and_by_default() -> None:
    graph_module = symbolic_trace(Net())
    infer_shapes(graph_module, scale=3.0, x=torch.zeros(1, 3, 4, 4))
    assert shapes(graph_module)[:3] == [(1, 3, 4, 4), 3.0, (1, 4, 2, 2)]


def test_nothing_is_touched() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.embed = Net(), nn.Embedding(5, 5, max_norm=0.1)
            self.instance = nn.InstanceNorm1d(5, track_running_stats=True)

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            hidden: Tensor = self.instance(self.net(x)[:, :, None].expand(-1, -1, 4))
            embedded: Tensor = self.embed(index)
            return hidden + embedded[:, :, None]

    module = Writing()
    graph_module = symbolic_trace(module)
    graph_module.register_buffer("count", torch.zeros(()))
    graph_module.plain = plain = torch.zeros(2)
    with graph_module.graph.inserting_before(list(iter_nodes(graph_module.graph))[-1]):
        for name in ("count", "plain"):
            graph_module.graph.call_method("add_", (graph_module.graph.create_node("get_attr", name), 1))
    tensors = {**graph_module.state_dict(), "plain": plain}
    before = {name: (tensor._version, tensor.clone()) for name, tensor in tensors.items()}
    random_state = torch.get_rng_state()
    infer_shapes(graph_module, torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.long))
    assert shapes(graph_module)[-1] == (2, 5, 4)
    for name, tensor in tensors.items():
        assert tensor._version == before[name][0], name
        assert torch.equal(tensor, before[name][1])
    assert torch.equal(random_state, torch.get_rng_state())
    assert torch.is_grad_enabled()
    assert type(module.net.conv.weight) is nn.Parameter
    assert [*graph_module.state_dict(), "plain"] == list(before)
    assert graph_module.plain is plain


def test_leaf_modules_that_branch_and_remember() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.cache: Tensor | None = None
            self.seen: list[Tensor] = []
            self.register_buffer("table", torch.zeros(1))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            if x.shape[0] > 2:
                x = x[:2]
            self.cache = x
            self.seen.append(x)
            self.table = x.detach()
            return {"hidden": self.linear(x), "first": x[0]}

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = Remembering()

        def forward(self, x: Tensor) -> Any:
            return self.leaf(x)["hidden"]

    class LeafTracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, Remembering) or super().is_leaf_module(m, module_qualified_name)

    root = Root()
    graph_module = GraphModule(root, LeafTracer().trace(root))
    infer_shapes(graph_module, torch.zeros(5, 4))
    leaf = nodes_of(graph_module)["leaf"].meta["val"]
    assert {name: tuple(value.shape) for name, value in leaf.items()} == {"hidden": (2, 4), "first": (4,)}
    assert shapes(graph_module)[-1] == (2, 4)
    assert root.leaf.cache is None
    assert root.leaf.seen == []
    assert root.leaf.table.shape == (1,)


def test_values_that_are_no_tensors() -> None:
    def forward(x: Tensor) -> Any:
        values, indices = torch.max(x, dim=-1)
        return {"sizes": x.size(), "split": x.chunk(2), "max": (values, indices), "dtype": x.dtype}

    graph_module = infer_shapes(symbolic_trace(forward), torch.zeros(4, 6))
    output = list(iter_nodes(graph_module.graph))[-1].meta["val"]
    assert output["sizes"] == (4, 6)
    assert [tuple(part.shape) for part in output["split"]] == [(2, 6), (2, 6)]
    assert output["dtype"] == torch.float32
    assert nodes_of(graph_module)["chunk"].meta["val"][0].shape == (2, 6)


def test_later_in_place_changes_of_shape_do_not_reach_back() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    relu = graph.call_function(torch.relu, (x,))
    graph.output(graph.call_method("unsqueeze_", (relu, 0)))
    graph_module = infer_shapes(GraphModule({}, graph), torch.zeros(2, 3))
    assert shapes(graph_module) == [(2, 3), (2, 3), (1, 2, 3), (1, 2, 3)]


def test_meta_module_and_mixed_devices() -> None:
    with torch.device("meta"):
        module = Net()
    for device, expected in (("meta", "meta"), ("cpu", "cpu")):
        graph_module = infer_shapes(symbolic_trace(module), torch.zeros(2, 3, 8, 8, device=device))
        facts = tensor_facts(nodes_of(graph_module)["head"], module.head.weight)
        assert facts is not None
        assert facts.device == torch.device(expected)
        assert facts.shape == (2, 5)
    assert module.head.weight.is_meta


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor], *, options: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sum": self.linear(x) + pair[0] * pair[1], "bias": options["bias"] - 1}


def test_export_graph_with_structured_inputs() -> None:
    x, pair, options = torch.zeros(3, 4), (torch.zeros(3, 4), torch.zeros(3, 1)), {"bias": torch.zeros(7)}
    for call in (((x, pair), {"options": options}), ((x,), {"options": options, "pair": pair})):
        graph_module = exported(Structured(), x, pair, options=options)
        for node in iter_nodes(graph_module.graph):
            node.meta.pop("val", None)
        infer_shapes(graph_module, *call[0], **call[1])
        assert shapes(graph_module)[-2] == (7,)
        assert tuple(nodes_of(graph_module)["linear"].meta["val"].shape) == (3, 4)
        assert all("val" in node.meta for node in iter_nodes(graph_module.graph))


def test_symbolic_inputs_stay_symbolic() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.zeros(6, 4), symbolic_context=context)
    graph_module = infer_shapes(symbolic_trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU())), x)
    facts = tensor_facts(output_of(graph_module))
    assert facts is not None
    assert same_size(facts.shape[0], x.shape[0])
    assert isinstance(facts.shape[0], torch.SymInt)
    assert facts.shape[1] == 8
    assert facts.proven
    assert not mode.allow_non_fake_inputs


def test_fake_inputs_of_two_modes_are_refused() -> None:
    graph_module = symbolic_trace(lambda x, y: x + y)
    one, other = (FakeTensorMode().from_tensor(torch.zeros(1)) for _ in range(2))
    with pytest.raises(PreconditionError, match="fake tensors of several modes"):
        infer_shapes(graph_module, one, other)


def test_failure_names_node_operation_and_cause_and_changes_nothing() -> None:
    graph_module = infer_shapes(symbolic_trace(Net()), torch.zeros(2, 3, 8, 8))
    before = shapes(graph_module)
    with pytest.raises(PreconditionError, match=r"node `head` \(call_module head, a Linear\)") as caught:
        graph_module.get_submodule("head").weight = nn.Parameter(torch.zeros(5, 9))
        infer_shapes(graph_module, torch.zeros(4, 3, 8, 8))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert shapes(graph_module) == before


def test_failure_that_depends_on_values() -> None:
    graph_module = symbolic_trace(lambda x: torch.nonzero(x) + 1)
    with pytest.raises(PreconditionError, match="node `nonzero`"):
        infer_shapes(graph_module, torch.zeros(3))
    assert all("val" not in node.meta for node in iter_nodes(graph_module.graph))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "missing a required argument: 'x'"),
        ((1, 2, 3), {}, r"too many positional arguments; the graph takes \(x, y\)"),
        ((1,), {"y": 1, "z": 2}, "unexpected keyword argument 'z'"),
        ((1,), {"x": 1, "y": 2}, "multiple values for argument 'x'"),
    ],
)
def test_wrong_arguments(args: tuple[int, ...], kwargs: dict[str, int], message: str) -> None:
    with pytest.raises(PreconditionError, match=message):
        infer_shapes(symbolic_trace(lambda x, y: x + y), *args, **kwargs)


def test_export_graph_with_a_missing_argument() -> None:
    x = torch.zeros(3, 4)
    graph_module = exported(Structured(), x, (x, x), options={"bias": x})
    with pytest.raises(PreconditionError, match="missing a required argument: 'options'"):
        infer_shapes(graph_module, x, (x, x))


def test_graphs_whose_forward_is_another() -> None:
    """Modules of dynamo make theirs at the first call, and an edited graph has an old one until it is recompiled."""
    found: list[tuple[int, ...]] = []

    def backend(graph_module: GraphModule, inputs: list[Tensor]) -> Any:
        infer_shapes(graph_module, *inputs)
        found.extend(tuple(node.meta["val"].shape) for node in graph_module.graph.find_nodes(op="placeholder"))
        return graph_module.forward

    torch.compile(lambda x, y: x * 2 + y, backend=backend)(torch.ones(2, 3), torch.ones(3))
    assert found == [(2, 3), (3,)]
    traced = torch.fx.symbolic_trace(lambda a, b: a * 2)
    a, b, *_ = traced.graph.nodes
    a.prepend(b)
    infer_shapes(traced, a=torch.ones(2), b=torch.ones(3))
    assert a.meta["val"].shape == (2,)
    traced.graph.erase_node(b)
    assert infer_shapes(traced, torch.ones(4)) is traced


def test_variable_arguments() -> None:
    graph = Graph()
    args, kwargs = graph.create_node("placeholder", "*args"), graph.create_node("placeholder", "**kwargs")
    first = graph.call_function(operator.getitem, (args, 1))
    graph.output(graph.call_function(torch.add, (first, graph.call_function(operator.getitem, (kwargs, "y")))))
    graph_module = infer_shapes(GraphModule({}, graph), torch.zeros(1), torch.zeros(2, 3), y=torch.zeros(3))
    assert shapes(graph_module)[-1] == (2, 3)


def test_grad_mode_and_autocast_are_left_as_they_were() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(torch._C._set_grad_enabled, (False,))
    graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", torch.bfloat16, True, None))
    product = graph.call_function(torch.mm, (x, x))
    graph.output(graph.call_function(torch.mm, (product, product)))
    graph_module = GraphModule({}, graph)
    infer_shapes(graph_module, torch.zeros(2, 2))
    assert product.meta["val"].dtype == torch.bfloat16
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(PreconditionError):
        infer_shapes(graph_module, torch.zeros(2, 3))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_inside_inference_mode_and_with_ties() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    with torch.inference_mode():
        graph_module = infer_shapes(symbolic_trace(module), torch.zeros(2, 4))
    assert shapes(graph_module)[-1] == (2, 4)


def test_modules_with_state_of_their_own_kind() -> None:
    module = nn.ModuleDict({"lstm": nn.LSTM(4, 3), "attention": nn.MultiheadAttention(4, 2)})

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = module

        def forward(self, x: Tensor) -> Any:
            return self.parts["lstm"](x), self.parts["attention"](x, x, x)

    for root in (Root(), Root().eval()):
        graph_module = infer_shapes(symbolic_trace(root), torch.zeros(5, 2, 4))
        (hidden, _), (attended, weights) = list(iter_nodes(graph_module.graph))[-1].meta["val"]
        assert (tuple(hidden.shape), tuple(attended.shape), tuple(weights.shape)) == ((5, 2, 3), (5, 2, 4), (2, 5, 5))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_tensors_without_a_fake_counterpart() -> None:
    graph_module = symbolic_trace(lambda x: torch.relu(x))
    quantized = torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)
    with pytest.raises(PreconditionError, match=r"no fake tensor can be made of a Tensor of torch.qint8"):
        infer_shapes(graph_module, quantized)
    graph_module.register_buffer("table", quantized)
    with pytest.raises(PreconditionError, match=r"^infer_shapes: no fake tensor can be made"):
        infer_shapes(graph_module, torch.zeros(2))
    assert all("val" not in node.meta for node in iter_nodes(graph_module.graph))


def test_nothing_refers_to_the_parameters_afterwards() -> None:
    """A weak reference to a parameter would let ``torch.utils.swap_tensors`` fail."""
    layer = nn.Linear(4, 4)
    infer_shapes(symbolic_trace(nn.Sequential(layer)), torch.zeros(2, 4))
    assert not weakref.getweakrefs(layer.weight)


IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "group norm": nn.GroupNorm(2, 8),
    "F.group_norm": lambda x: F.group_norm(x, 4),
    "instance norm": F.instance_norm,
    "batch norm": nn.BatchNorm2d(8).eval(),
    "roll": lambda x: x.roll(1, 2),
    "roll of all elements": lambda x: x.roll(1),
    "channel shuffle": lambda x: F.channel_shuffle(x, 2),
}


@pytest.mark.parametrize("operation", IMAGES.values(), ids=IMAGES.keys())
def test_strides_of_images_are_those_of_eager_mode(operation: Callable[[Tensor], Tensor]) -> None:
    """Where torch's fake tensors have other strides, too; which do depends on its release."""
    plain = torch.randn(2, 8, 6, 4)
    last = plain.to(memory_format=torch.channels_last)
    for x in (plain, last, plain.mT, torch.cat([last, last], 1)[:, :8]):
        graph_module = infer_shapes(symbolic_trace(Called(operation)), x)
        assert output_of(graph_module).meta["val"].stride() == operation(x).stride()
