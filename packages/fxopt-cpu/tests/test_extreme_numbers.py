"""NaN, infinity and the largest numbers come out where torch has them, or the record says that they do not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fxopt_core import history
from fxopt_cpu import Activation, FuseConvolutions, PackedConv2d, PlanRegions
from fxopt_cpu.layers.epilogue import CODES
from fxopt_rewrite import infer_shapes

MODULES: dict[str, nn.Module] = {
    "relu": nn.ReLU(),
    "relu6": nn.ReLU6(),
    "hardtanh": nn.Hardtanh(),
    "hardswish": nn.Hardswish(),
    "hardsigmoid": nn.Hardsigmoid(),
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "leaky_relu": nn.LeakyReLU(),
}
EXTREMES = [math.nan, math.inf, -math.inf, 3e38, -3e38, 1e30, -1e30, 1e4, -1e4]


def rows() -> Tensor:
    x = torch.zeros(len(EXTREMES), 16)
    x[:, 0] = torch.tensor(EXTREMES)
    return x


@pytest.mark.parametrize("name", CODES)
@torch.no_grad()
def test_convolutions_by_rows_keep_extreme_numbers(name: str) -> None:
    activation = Activation(name, 0.1, 6.0)
    layer = PackedConv2d(16, 16, (1, 1), bias=False, activation=activation)
    x = rows()[:, :, None, None].expand(-1, -1, 2, 2).contiguous(memory_format=torch.channels_last)
    layer.weight.zero_()
    layer.weight[:, 0] = 1
    found, expected = layer(x), activation(x[:, :1].expand_as(x).contiguous())
    assert not layer.drops
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


def conv_net(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), activation, nn.Conv2d(8, 4, 3, groups=2), activation).eval()


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("pixel", [math.nan, -math.inf])
@torch.no_grad()
def test_convolutions_keep_them_by_an_option(name: str, pixel: float) -> None:
    net, x = conv_net(MODULES[name]), torch.randn(2, 3, 9, 9)
    x[0, 1, 4, 4] = pixel
    graph_module = PlanRegions()(FuseConvolutions(keep_nan=True)(infer_shapes(torch.fx.symbolic_trace(net), x)))
    expected = net(x)
    for _ in range(4):
        torch.testing.assert_close(graph_module(x), expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert not [rewrite.note for record in history(graph_module) for rewrite in record.rewrites if rewrite.note]


@torch.no_grad()
def test_the_record_says_what_hides_nan() -> None:
    net, x = conv_net(nn.ReLU()), torch.randn(2, 3, 9, 9)
    graph_module = FuseConvolutions()(torch.fx.symbolic_trace(net))
    x[0, 1, 4, 4] = math.nan
    assert net(x).isnan().any()
    assert not graph_module(x).isnan().any()
    notes = [rewrite.note for rewrite in history(graph_module)[0].rewrites]
    assert notes == ["oneDNN's relu turns NaN into a number"] * 2
