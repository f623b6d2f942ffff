"""Models whose layers are rounded, and how much of their results is lost."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt_cpu import PanelLinear, QuantizedConv2d


class Mlp(nn.Module):
    """Three layers, the second without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(16, 32), nn.Linear(32, 32, bias=False), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Any:
        return self.down(F.gelu(self.mid(F.gelu(self.up(x)))))


class Net(nn.Module):
    """Convolutions: padded around, strided with a sum, and over single pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 32, 3, 2, 1, bias=False)
        self.short, self.last = nn.Conv2d(16, 32, 1, 2), nn.Conv2d(32, 24, 1)

    def forward(self, x: Tensor) -> Any:
        return self.last(F.relu(self.two(F.relu(self.one(x))) + self.short(x)))


def layers(graph_module: nn.Module) -> list[Any]:
    return [module for module in graph_module.modules() if isinstance(module, PanelLinear | QuantizedConv2d)]


@torch.no_grad()
def sqnr(found: nn.Module, model: nn.Module, x: Tensor) -> float:
    """Signal over error of a graph, in dB."""
    expected = model(x)
    return float(10 * torch.log10(expected.square().sum() / (found(x) - expected).square().sum()))
