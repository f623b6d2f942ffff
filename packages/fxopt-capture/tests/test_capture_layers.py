"""Calls of layers are raised to modules exactly where the layer would compute the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from site_passes import Computes
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from fxopt_capture import capture
from fxopt_core import iter_nodes

GUARDS = "_guards_fn"


def called(graph_module: GraphModule) -> list[str]:
    """Return the names of the layers that the graph calls, in order."""
    nodes = iter_nodes(graph_module.graph)
    return [str(node.target) for node in nodes if node.op == "call_module" and node.target != GUARDS]


def operators(graph_module: GraphModule) -> list[str]:
    return [str(node.target) for node in iter_nodes(graph_module.graph) if node.op == "call_function"]


def check_equal(model: nn.Module, graph_module: GraphModule, *inputs: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(graph_module(*inputs), model(*inputs), rtol=0, atol=0)


LAYERS = {
    "linear": (nn.Linear(4, 3), (2, 4)),
    "linear_without_bias": (nn.Linear(4, 3, bias=False), (2, 5, 4)),
    "conv1d": (nn.Conv1d(4, 6, 3, padding=1, groups=2), (2, 4, 8)),
    "conv2d": (nn.Conv2d(4, 6, (3, 1), stride=2, dilation=(2, 1), bias=False), (2, 4, 8, 8)),
    "conv2d_same": (nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 8, 8)),
    "conv2d_valid": (nn.Conv2d(4, 6, 3, padding="valid"), (2, 4, 8, 8)),
    "conv3d": (nn.Conv3d(2, 3, 3, padding=(1, 0, 1)), (2, 2, 4, 4, 4)),
    "conv_transpose1d": (nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), (2, 4, 8)),
    "conv_transpose2d": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, bias=False), (2, 4, 5, 5)),
    "conv_transpose3d": (nn.ConvTranspose3d(2, 2, 2, groups=2), (2, 2, 3, 3, 3)),
    "batch_norm1d": (nn.BatchNorm1d(4), (3, 4)),
    "batch_norm1d_sequence": (nn.BatchNorm1d(4, affine=False), (3, 4, 5)),
    "batch_norm2d": (nn.BatchNorm2d(4, eps=1e-3, momentum=0.3), (3, 4, 5, 5)),
    "batch_norm2d_average": (nn.BatchNorm2d(4, momentum=None), (3, 4, 5, 5)),
    "batch_norm2d_without_statistics": (nn.BatchNorm2d(4, track_running_stats=False), (3, 4, 5, 5)),
    "batch_norm3d": (nn.BatchNorm3d(4), (3, 4, 2, 2, 2)),
    "layer_norm": (nn.LayerNorm(4, eps=1e-3), (2, 5, 4)),
    "layer_norm_without_affine": (nn.LayerNorm((5, 4), elementwise_affine=False), (2, 5, 4)),
    "group_norm": (nn.GroupNorm(2, 4), (2, 4, 5)),
}


class Each(nn.ModuleDict):
    """Calls each of its layers with an input of its own."""

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [layer(x) for layer, x in zip(self.values(), inputs, strict=True)]


def test_layers_are_raised() -> None:
    embeddings = {f"embedding{index}": nn.Embedding(10, 4, padding_idx=index) for index in (None, 0, -1)}
    model = Each({**{name: layer for name, (layer, _) in LAYERS.items()}, **embeddings}).eval()
    first, second = (
        [torch.randn(batch, *shape[1:]) for _, shape in LAYERS.values()] + [torch.randint(10, (batch, 3))] * 3
        for batch in (3, 5)
    )
    graph_module = capture(model, tuple(x.clone() for x in first))
    assert called(graph_module) == list(model)
    assert operators(graph_module) == []
    for name, layer in model.items():
        assert type(graph_module.get_submodule(name)) is type(layer)
    check_equal(model, graph_module, *second)


class OwnLinear(nn.Linear):
    """A subclass: what it does is its own business."""


def hooked() -> nn.Linear:
    layer = nn.Linear(4, 3)
    layer.register_forward_hook(lambda module, args, output: output * 2)
    return layer


def with_own_forward() -> nn.Linear:
    layer = nn.Linear(4, 3)
    vars(layer)["forward"] = lambda x: F.linear(x, layer.weight, layer.bias) + 1
    return layer


def test_anything_but_the_plain_layer_stays_an_operator() -> None:
    layers: dict[str, nn.Module] = {
        "subclass": OwnLinear(4, 3),
        "hook": hooked(),
        "own_forward": with_own_forward(),
        "parametrization": parametrizations.weight_norm(nn.Linear(4, 3)),
        "circular": nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
    }
    model = Each(layers).eval()
    graph_module = capture(model, (*(torch.randn(2, 4) for _ in range(4)), torch.randn(2, 2, 6, 6)))
    assert called(graph_module) == []
    assert operators(graph_module).count("aten.linear.default") == 4
    assert list(graph_module.state_dict()) == list(model.state_dict())
    check_equal(model, graph_module, *(torch.randn(3, 4) for _ in range(4)), torch.randn(3, 2, 6, 6))


def test_renormalizing_embedding_stays_an_operator() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=1.0)).eval()
    graph_module = capture(model, torch.randint(10, (2, 3)))
    assert called(graph_module) == []


class Functional(nn.Module):
    """Uses a layer's parameters by hand."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, stride=2)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.conv.weight, self.conv.bias, stride=self.stride)


@pytest.mark.parametrize(("stride", "expected"), [(2, ["conv"]), (1, [])])
def test_functional_call_is_raised_only_if_it_is_what_the_layer_does(stride: int, expected: list[str]) -> None:
    model = Functional(stride).eval()
    graph_module = capture(model, torch.randn(2, 2, 8, 8))
    assert called(graph_module) == expected
    check_equal(model, graph_module, torch.randn(3, 2, 8, 8))


def test_mixed_tensors_stay_an_operator() -> None:
    model = Computes(
        lambda m, x: F.linear(m.first(x), m.first.weight, m.second.bias), first=nn.Linear(3, 3), second=nn.Linear(3, 3)
    ).eval()
    graph_module = capture(model, torch.randn(2, 3))
    assert called(graph_module) == ["first"]
    assert operators(graph_module) == ["aten.linear.default"]
    check_equal(model, graph_module, torch.randn(4, 3))


class Tied(nn.Module):
    """A decoder whose weight is the embedding's, without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.unused = nn.Linear(2, 2)
        self.twice = nn.Linear(4, 4)
        self.again = self.twice
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.again(self.twice(self.embedding(ids))))


def test_owner_is_the_module_that_ran_although_tensors_are_tied() -> None:
    model = Tied().eval()
    graph_module = capture(model, torch.randint(10, (2, 3)))
    assert called(graph_module)[0] == "embedding"
    assert called(graph_module)[-1] == "head"
    assert all(name in ("twice", "again") for name in called(graph_module)[1:-1])
    assert graph_module.get_submodule("head").weight is model.embedding.weight
    assert graph_module.get_submodule("embedding").weight is model.embedding.weight
    assert graph_module.twice is graph_module.again
    check_equal(model, graph_module, torch.randint(10, (5, 3)))


def test_batch_norm_in_training_mode_stays_operators_that_count() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).train()
    graph_module = capture(model, torch.randn(4, 3))
    assert called(graph_module) == ["1"]
    assert model[0].num_batches_tracked == 0
    x = torch.randn(4, 3)
    torch.testing.assert_close(graph_module(x), copy.deepcopy(model)(x))
    assert model[0].num_batches_tracked == 1


def test_frozen_batch_norm_in_a_training_model() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)).train()
    model[1].eval()
    graph_module = capture(model, torch.randn(2, 2, 3, 3))
    assert called(graph_module) == ["0", "1"]
    assert graph_module.training
    assert not graph_module.get_submodule("1").training
    check_equal(model, graph_module, torch.randn(3, 2, 3, 3))
