"""`read_activation` and `read_embedding`: activations and embeddings in every form of graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, GraphModule

from fxopt_rewrite import ActivationCall, EmbeddingCall, GraphIndex, Obstacle, read_activation, read_embedding

aten = torch.ops.aten
SLOPE = {"negative_slope": 0.2}

# what is called, its further arguments and keywords, and: name, settings, in place
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any], tuple[Any, ...]]] = [
    (F.relu, (True,), {}, ("relu", {}, True)),
    (F.relu6, (), {"inplace": True}, ("relu6", {}, True)),
    (F.gelu, (), {"approximate": "tanh"}, ("gelu", {"approximate": "tanh"}, False)),
    (F.leaky_relu, (0.2, True), {}, ("leaky_relu", SLOPE, True)),
    (F.softplus, (2,), {}, ("softplus", {"beta": 2, "threshold": 20.0}, False)),
    (torch.clip, (0, 6), {}, ("clamp", {"min": 0, "max": 6}, False)),
    ("tanh_", (), {}, ("tanh", {}, True)),
    ("clamp_min", (0,), {}, ("clamp_min", {"min": 0}, False)),
    (aten.hardtanh_.default, (0.0, 6.0), {}, ("hardtanh", {"min_val": 0.0, "max_val": 6.0}, True)),
    (aten.elu.default, (0.5, 1, 1), {}, ("elu", {"alpha": 0.5}, False)),
]
MODULES: list[tuple[nn.Module, tuple[Any, ...]]] = [
    (nn.ReLU(inplace=True), ("relu", {}, True)),
    (nn.GELU("tanh"), ("gelu", {"approximate": "tanh"}, False)),
    (nn.LeakyReLU(0.2), ("leaky_relu", SLOPE, False)),
    (nn.Hardtanh(0, 6), ("hardtanh", {"min_val": 0, "max_val": 6}, False)),
]


def read(target: Any, *args: Any, **kwargs: Any) -> ActivationCall | Obstacle | None:
    graph = Graph()
    x = graph.placeholder("x")
    call: Any = graph.call_method if isinstance(target, str) else graph.call_function
    node = call(target, (x, *args), kwargs)
    graph.output(node)
    return read_activation(GraphIndex(GraphModule({}, graph)), node)


@pytest.mark.parametrize(("target", "args", "kwargs", "wanted"), CALLS)
def test_calls(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: tuple[Any, ...]) -> None:
    call = read(target, *args, **kwargs)
    assert isinstance(call, ActivationCall)
    assert (call.name, call.settings, call.inplace) == wanted
    assert call.input.name == "x"


@pytest.mark.parametrize(("module", "wanted"), MODULES)
def test_modules(module: nn.Module, wanted: tuple[Any, ...]) -> None:
    index = GraphIndex(torch.fx.symbolic_trace(nn.Sequential(module)))
    call = read_activation(index, index.nodes[1])
    assert isinstance(call, ActivationCall)
    assert (call.name, call.settings, call.inplace) == wanted


def test_what_is_no_plain_activation() -> None:
    for target in (torch.add, torch.sin, "view", lambda x: x):
        assert read(target) is None
    assert isinstance(read(aten.elu.default, 1.0, 2.0), Obstacle)  # another scale: a SELU
    assert isinstance(read(torch.sigmoid, out=torch.ones(1)), Obstacle)
    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda *_: None)
    index = GraphIndex(torch.fx.symbolic_trace(nn.Sequential(hooked, nn.Linear(2, 2))))
    assert isinstance(read_activation(index, index.nodes[1]), Obstacle)
    assert read_activation(index, index.nodes[2]) is None


class Rows(nn.Module):
    """An embedding as a function."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.settings = settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.embedding(x, self.table.weight, **self.settings)


@pytest.mark.parametrize("form", ["module", "function", "export"])
def test_embeddings(form: str) -> None:
    model: nn.Module = nn.Sequential(nn.Embedding(9, 4, padding_idx=2)) if form == "module" else Rows(padding_idx=-7)
    traced = torch.fx.symbolic_trace(model)
    if form == "export":
        traced = torch.export.export(model, (torch.ones(3, dtype=torch.int64),)).module()
    index = GraphIndex(traced)
    (call,) = filter(None, (read_embedding(index, node) for node in index.nodes))
    assert isinstance(call, EmbeddingCall)
    assert (call.padding_idx, tuple(call.weight.tensor.shape)) == (2, (9, 4))


def test_embeddings_that_write_their_weight() -> None:
    for model in (nn.Sequential(nn.Embedding(9, 4, max_norm=1.0)), Rows(max_norm=1.0)):
        index = GraphIndex(torch.fx.symbolic_trace(model))
        (found,) = filter(None, (read_embedding(index, node) for node in index.nodes))
        assert isinstance(found, Obstacle)
        assert found.reason == "mutated"
