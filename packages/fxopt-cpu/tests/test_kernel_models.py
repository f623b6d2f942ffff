"""A whole encoder through the pipelines: plans, memory, archives, copies, live models, and back."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from region_plans import plans_of
from torch import Tensor, nn

from fxopt_core import registry, undo
from fxopt_cpu import FuseAttention, FuseLinears, FuseNorms, PanelLinear, PlanRegions, isa
from fxopt_cpu.layers.thawing import Thawing

pytestmark = pytest.mark.skipif(isa() is None, reason="the library was not built")
WIDTH, HEADS = 64, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.one, self.other = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        parts: Any = self.qkv(x).chunk(3, -1)
        query, key, value = (parts[place].unflatten(-1, (HEADS, -1)).transpose(1, 2) for place in range(3))
        heads = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        rows = heads.transpose(1, 2).flatten(2)
        x = self.one(self.out(rows) + x)
        return self.other(self.down(nn.functional.gelu(self.up(x))) + x)


class Encoder(nn.Module):
    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(50, WIDTH), nn.Embedding(20, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, places: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.words(ids) + self.places(places))
        for layer in self.layers:
            x = layer(x, mask)
        return x, torch.tanh(self.head(x.select(1, 0)))


def _inputs(rows: int = 2, length: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    mask = torch.ones(rows, 1, 1, length, dtype=torch.bool)
    mask[0, :, :, length // 2 + 1 :] = False
    return torch.randint(50, (rows, length)), torch.arange(length).unsqueeze(0), mask


def _fused(model: nn.Module) -> torch.fx.GraphModule:
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=20)
    shapes = ({0: batch, 1: length}, {1: length}, {0: batch, 3: length})
    graph_module = torch.export.export(model, _inputs(), dynamic_shapes=shapes).module()
    assert isinstance(graph_module, torch.fx.GraphModule)
    for transformation in (FuseAttention(), FuseNorms(), FuseLinears(), PlanRegions()):
        transformation(graph_module)
    return graph_module


def _same(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def made(layers: int) -> Encoder:
    torch.manual_seed(0)
    model = Encoder(layers).eval()
    for norm in (module for module in model.modules() if isinstance(module, nn.LayerNorm)):
        nn.init.normal_(norm.weight, 1.0, 0.2)
    return model


@pytest.fixture
def model() -> Encoder:
    return made(1)


@torch.no_grad()
def test_one_call_for_all_and_plans_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(2)
    graph_module = _fused(model)
    calls = [node for node in graph_module.graph.nodes if node.op.startswith("call") and "guards" not in node.name]
    assert len(calls) == 1 + 2 * 5 + 2  # embeddings, five for each layer, the first row and the head
    for rows, length in ((2, 9), (1, 5), (3, 20)):
        inputs = _inputs(rows, length)
        wanted = model(*inputs)
        alone = [found.clone() for found in graph_module(*inputs)]
        _same(alone, wanted)
        for _ in range(2):
            together = graph_module(*inputs)
        assert all(map(torch.equal, together, alone))
    plans = plans_of(graph_module)
    assert len(plans) == 3
    monkeypatch.setattr("fxopt_cpu.regions.running._MOST_PLANS", 3)
    for _ in range(2):
        graph_module(*_inputs(4, 7))
    assert plans_of(graph_module)[:2] == plans[1:]  # the oldest one went
    many = [tensor.expand(2, -1, -1, 9) if tensor.dim() == 4 else tensor for tensor in _inputs()]  # strides
    _same(graph_module(*many), model(*many))


@torch.no_grad()
def test_changes_are_seen_by_plans(model: Encoder) -> None:
    graph_module, inputs = _fused(model), _inputs()

    def check() -> None:
        for _ in range(4):
            _same(graph_module(*inputs), model(*inputs))

    check()
    model.layers[0].get_submodule("one").get_parameter("weight").data.mul_(0.5)
    check()
    model.words.weight[3] += 1.0
    check()
    model.norm.bias.fill_(0.1)
    check()
    assert plans_of(graph_module)


@torch.no_grad()
def test_memory_is_that_of_the_model() -> None:
    model = Encoder().eval()
    held = sum(parameter.nbytes for parameter in model.parameters())
    graph_module, inputs = _fused(model), _inputs()
    del model
    gc.collect()
    for _ in range(4):
        graph_module(*inputs)
    layers = [module for module in graph_module.modules() if isinstance(module, PanelLinear)]
    assert all(isinstance(held, Thawing) and held.frozen for held in (layer._parameters for layer in layers))
    panels = [layer.panels.panels for layer in layers if layer.panels is not None]
    assert len(panels) == len(layers)
    plain = [tensor for module in graph_module.modules() for tensor in dict.values(module._parameters)]
    assert sum(tensor.nbytes for tensor in (*panels, *plain) if tensor is not None) <= 1.1 * held
    (plan,) = plans_of(graph_module)
    assert {id(tensor) for tensor in plan.weights} <= {id(tensor) for tensor in (*panels, *plain)}


@torch.no_grad()
def test_copies_pickles_and_archives(model: Encoder, tmp_path: Path) -> None:
    fxopt = pytest.importorskip("fxopt")
    inputs = _inputs()
    wanted = model(*inputs)
    graph_module = fxopt.capture(model, inputs)
    registry().pipeline("fuse-attention,fuse-norms,fuse-linears,plan-regions")(graph_module)
    for _ in range(3):
        _same(graph_module(*inputs), wanted)
    for other in (copy.deepcopy(graph_module), pickle.loads(pickle.dumps(graph_module))):
        for _ in range(3):
            _same(other(*inputs), wanted)
        assert plans_of(other)
    fxopt.save(graph_module, tmp_path / "encoder.fxopt")
    loaded = fxopt.load(tmp_path / "encoder.fxopt")
    for _ in range(3):
        _same(loaded(*inputs), wanted)


def test_undo_after_runs(model: Encoder) -> None:
    values = {key: value.clone() for key, value in model.state_dict().items()}
    graph_module, inputs = _fused(model), _inputs()
    wanted = model(*inputs)
    del model
    with torch.no_grad():
        for _ in range(3):
            graph_module(*inputs)
    for _ in range(4):
        undo(graph_module)
    assert not [module for module in graph_module.modules() if "fxopt" in type(module).__module__]
    found = graph_module.state_dict()
    assert found.keys() == values.keys()
    assert all(torch.equal(found[key], values[key]) for key in values)
    _same(graph_module(*inputs), wanted)


@torch.inference_mode()
def test_the_first_call_has_the_bits_of_the_later_ones_also_after_a_change(model: Encoder) -> None:
    graph_module = _fused(model)
    for _ in range(2):
        for inputs in (_inputs(), _inputs(3, 5)):
            first, plans = graph_module(*inputs), len(plans_of(graph_module))
            torch.testing.assert_close(graph_module(*inputs), first, rtol=0, atol=0)
            assert len(plans_of(graph_module)) == plans > 0
        with torch.inference_mode(False), torch.no_grad():
            next(p for name, p in graph_module.named_parameters() if name.endswith("norm_weight")).mul_(1.5)
