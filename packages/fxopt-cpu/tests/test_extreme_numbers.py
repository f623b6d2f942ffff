"""NaN, infinity and the largest numbers come out where torch has them, or the record says that they do not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fxopt_core import history
from fxopt_cpu import FuseConvolutions, PlanRegions
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
