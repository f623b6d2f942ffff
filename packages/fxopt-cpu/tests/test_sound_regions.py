"""Convolutions over one dimension: packed layers, and plans of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from region_plans import plans_of
from site_passes import Computes
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_capture import capture
from fxopt_core import history, registry, undo
from fxopt_cpu import FuseConvolutions, PackedConv1d
from fxopt_cpu.library import ISAS, isa
from fxopt_rewrite import infer_shapes

PIPELINE = "fold-batch-norm,fuse-convolutions,plan-regions"
planned_here = pytest.mark.skipif(isa() not in ISAS[1:], reason="convolutions are planned on processors with AVX2")


class Voice(nn.Module):
    """Enlarged twice, with dilated, grouped and depthwise layers after, residual sums, and a gate by means."""

    def __init__(self, stride: int = 4, size: int = 8, padding: int = 2, extra: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv1d(5, 24, 7, padding=3)
        self.up = nn.ConvTranspose1d(24, 12, size, stride, padding, extra)
        self.wide = nn.Conv1d(12, 12, 3, padding="same", dilation=3)
        self.grouped, self.deep = nn.Conv1d(12, 12, 3, padding=1, groups=3), nn.Conv1d(12, 12, 5, 2, 2, groups=12)
        self.norm, self.gate = nn.BatchNorm1d(12), nn.Conv1d(12, 12, 1)
        self.last = nn.Conv1d(24, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Any:
        """(batch, 5, frames) to (batch, 1, longer)."""
        x = F.leaky_relu(self.up(F.leaky_relu(self.first(x), 0.1)), 0.1)
        x = x + self.wide(x)
        x = self.norm(F.relu(self.grouped(x)))
        x = x * torch.sigmoid(self.gate(x.mean(2, keepdim=True)))
        y = self.deep(x)
        return torch.tanh(self.last(torch.cat((y, F.silu(y)), 1)))


def ready(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm1d):
                assert norm.running_mean is not None and norm.running_var is not None
                norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2.0)
    return model.eval()


def planned(model: nn.Module, x: Tensor, *, traced: bool = True) -> GraphModule:
    graph_module = infer_shapes(torch.fx.symbolic_trace(model), x) if traced else capture(model, (x,))
    return registry().pipeline(PIPELINE)(graph_module)


@torch.no_grad()
@planned_here
@pytest.mark.parametrize(
    ("stride", "size", "padding", "extra"), [(4, 8, 2, 1), (8, 16, 4, 0), (2, 2, 0, 0), (5, 15, 3, 0), (1, 4, 3, 0)]
)
def test_a_voice_is_one_plan(stride: int, size: int, padding: int, extra: int) -> None:
    model = ready(Voice(stride, size, padding, extra))
    graph_module = planned(model, torch.randn(2, 5, 20), traced=size != 8)
    for shape in ((2, 5, 20), (1, 5, 20)):
        x = torch.randn(*shape)
        for each in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
            expected = model(each)
            first = graph_module(each)
            torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)
            assert first.stride() == expected.stride() and torch.equal(first, graph_module(each))
    assert len(plans_of(graph_module)) == 4
    x[0, 0, 7] = torch.nan
    torch.testing.assert_close(graph_module(x), model(x), rtol=1e-4, atol=1e-5, equal_nan=True)


class Averaged(nn.Module):
    """Means of several layers of one input, as HiFi-GAN has them, in place and not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(4, 16, 3, padding=1), nn.Conv1d(16, 1, 7, padding=3)
        self.layers = nn.ModuleList(nn.Conv1d(16, 16, 3, padding=step, dilation=step) for step in (1, 3, 5))

    def forward(self, x: Tensor) -> Any:
        """(batch, 4, frames) to (batch, 1, frames)."""
        x = self.first(x)
        for _ in range(2):
            found = self.layers[0](F.leaky_relu(x, 0.1))
            for layer in list(self.layers)[1:]:
                found += layer(F.leaky_relu(x, 0.1))
            x = found / len(self.layers)
        return self.last(x / (x * x + 1.0))


@torch.no_grad()
@planned_here
@pytest.mark.parametrize("traced", [False, True])
def test_means_of_layers_are_in_the_plan(traced: bool) -> None:
    model, x = ready(Averaged()), torch.randn(2, 4, 50)
    graph_module = planned(model, x, traced=traced)
    torch.testing.assert_close(graph_module(x), model(x), rtol=1e-4, atol=1e-5)
    assert len(plans_of(graph_module)) == 1


def _results(m: Any, x: Tensor) -> Any:
    first = F.gelu(m.first(x))
    second = first + m.second(first)
    deep = m.deep(second)
    return second, x + m.second(first)[:, :8], deep, m.last(deep)


@torch.no_grad()
@planned_here
@pytest.mark.parametrize("traced", [False, True])
def test_results_have_the_strides_of_eager_whatever_those_of_the_input(traced: bool) -> None:
    layers = {"first": nn.Conv1d(8, 16, 3, padding=1), "second": nn.Conv1d(16, 16, 3, padding=1)}
    more = {"deep": nn.Conv1d(16, 16, 5, 2, 2, groups=16), "last": nn.ConvTranspose1d(16, 4, 4, 2, 1)}
    model, x = ready(Computes(_results, **layers, **more)), torch.randn(2, 8, 30)
    last = x.mT.contiguous().mT
    for example in (x, last):
        graph_module = planned(model, example, traced=traced)
        for each in (x, last):
            for found, expected in zip(graph_module(each), model(each), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
                assert found.stride() == expected.stride()
        assert plans_of(graph_module)


@torch.no_grad()
@planned_here
@pytest.mark.parametrize(("stride", "size"), [(2, 3), (5, 3), (2, 4)])
def test_windows_with_a_rest_run_by_torch_so_that_nan_stays_where_it_is(stride: int, size: int) -> None:
    layers = [nn.Conv1d(4, 16, 1), nn.LeakyReLU(), nn.ConvTranspose1d(16, 8, size, stride), nn.Conv1d(8, 8, 1)]
    layers.append(nn.Conv1d(8, 8, 1))
    model, x = nn.Sequential(*layers).eval(), torch.randn(1, 4, 9)
    graph_module = planned(model, x)
    for bad in (torch.nan, torch.inf):
        x[0, :, 4] = bad
        torch.testing.assert_close(graph_module(x), model(x), rtol=1e-4, atol=1e-5, equal_nan=True)


@torch.no_grad()
@planned_here
def test_lengths_that_are_added_beyond_the_padding_are_not_planned() -> None:
    model, x = ready(Voice(4, 4, 0, 2)), torch.randn(2, 5, 20)
    graph_module = planned(model, x)
    torch.testing.assert_close(graph_module(x), model(x), rtol=1e-4, atol=1e-5)
    assert any("up" in str(node.target) for node in graph_module.graph.nodes)


@torch.no_grad()
@planned_here
def test_plans_hold_the_weights_alone_and_see_their_changes() -> None:
    model, x = ready(Voice()), torch.randn(2, 5, 20)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    graph_module = planned(model, x)
    expected = model(x)
    torch.testing.assert_close(graph_module(x), expected, rtol=1e-4, atol=1e-5)
    layers = [each for each in graph_module.modules() if isinstance(each, PackedConv1d)]
    assert len(layers) == 6
    by_shape = {tuple(tensor.shape): tensor for tensor in weights.values()}
    for layer in layers:
        shape = (layer.out_channels, layer.in_channels // layer.groups, layer.kernel_size[1])
        assert layer.weight.shape == shape and shape in by_shape
    graph_module(x)
    layers[0].weight.mul_(2.0), layers[0].get_parameter("bias").mul_(2.0)
    model.get_parameter("first.weight").mul_(2.0), model.get_parameter("first.bias").mul_(2.0)
    torch.testing.assert_close(graph_module(x), model(x), rtol=1e-4, atol=1e-5)
    restored = undo(graph_module)
    torch.testing.assert_close(restored(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.fixture
def any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack layers over one dimension however few there are."""
    monkeypatch.setattr("fxopt_cpu.passes.fuse_convolutions.FEWEST_LINES", 1)


@pytest.mark.usefixtures("any_number")
@pytest.mark.parametrize("padding", [0, 2, "same", "valid"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_packed_layer_computes_what_the_modules_do(padding: int | str, groups: int) -> None:
    settings = {"padding": padding, "dilation": 2, "groups": groups}
    model = nn.Sequential(nn.ConstantPad1d((1, 2), 0.0), nn.Conv1d(4, 8, 4, **settings), nn.GELU()).eval()  # type: ignore[arg-type]  # mypy cannot know which is which
    x = torch.randn(3, 4, 17, requires_grad=True)
    traced = torch.fx.symbolic_trace(model)
    graph_module = FuseConvolutions()(traced)
    assert isinstance(graph_module.get_submodule("1_packed"), PackedConv1d)
    for each in (x, x[0]):  # one without a batch, too
        torch.testing.assert_close(graph_module(each), model(each))
    expected, found = (torch.autograd.grad(run(x).square().sum(), x)[0] for run in (model, graph_module))
    torch.testing.assert_close(found, expected)
    restored = FuseConvolutions()(graph_module, reverse=True)
    assert restored.state_dict().keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(restored.state_dict()[key], tensor)


@pytest.mark.usefixtures("any_number")
def test_padding_of_channels_stays() -> None:
    model = nn.Sequential(nn.ConstantPad2d((1, 1, 1, 0), 0.0), nn.Conv1d(4, 8, 3)).eval()
    x = torch.randn(3, 3, 17)
    graph_module = FuseConvolutions()(torch.fx.symbolic_trace(model))
    torch.testing.assert_close(graph_module(x), model(x))


def test_other_convolutions_are_refused_in_words() -> None:
    reflecting = nn.Conv1d(8, 8, 3, padding=1, padding_mode="reflect")
    model = nn.Sequential(nn.ConvTranspose1d(4, 8, 3), reflecting, nn.Conv3d(3, 4, 1)).eval()
    (record,) = history(FuseConvolutions()(torch.fx.symbolic_trace(model), expect=0))
    assert [refusal.reason for refusal in record.refusals] == ["other-convolution"] * 3
    expected = "over 1 dimension(s); expected a plain one over 2, or one of 3 or more plain ones over 1"
    found = [each.message for each in record.refusals[:2]]
    assert found == [f"convolution `0` is transposed, {expected}", f"convolution `1` is plain, {expected}"]


@torch.no_grad()
@planned_here
def test_pools_of_images_without_a_batch_run_by_torch() -> None:
    def function(m: Any, x: Tensor) -> Any:
        x = F.max_pool2d(m.layers[1](m.layers[0](x)), 2)  # halves channels and frames
        return m.layers[3](F.relu(F.avg_pool2d(m.layers[2](torch.cat((x, -x), 1)), 3, 1, 1)))

    layers = nn.ModuleList(nn.Conv1d(8, 8, 3, padding=1) for _ in range(4))
    model, x = Computes(function, layers=layers).eval(), torch.randn(2, 8, 20)
    graph_module = planned(model, x)
    torch.testing.assert_close(graph_module(x), model(x), rtol=1e-4, atol=1e-5)
    assert plans_of(graph_module)
