"""Models for the tests on several processes: a small transformer, its parts merged, folded and divided."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fxopt

WIDTH = 8


class Block(nn.Module):
    """Grouped attention without attention: rows that do not divide by the number of processes, one absent bias."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 2, bias), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        gate = torch.cat([self.k(x), self.v(x), self.v(x)], -1)
        return x + self.o(torch.tanh(self.q(x)) * gate / 2)


class Model(nn.Module):
    """A convolution with a batch norm to fold, and blocks to merge."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, WIDTH, 3, bias=False), nn.BatchNorm2d(WIDTH))
        self.blocks = nn.Sequential(Block(bias), Block(bias))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.blocks(self.stem(x).flatten(2).transpose(1, 2)))


def model(seed: int = 0, bias: bool = False) -> Model:
    torch.manual_seed(seed)
    made = Model(bias).eval()
    for buffer in made.buffers():
        if buffer.is_floating_point():
            nn.init.uniform_(buffer, 0.5, 1.5)
    return made


def rewritten(plain: nn.Module) -> GraphModule:
    graph_module = fxopt.symbolic_trace(copy.deepcopy(plain))  # which shares layers with what it traces
    fxopt.MergeLinears()(graph_module, expect=2)
    return graph_module


def folded(plain: nn.Module) -> GraphModule:
    return fxopt.FuseBatchNorm2dInConv2d()(rewritten(plain), expect=1)


def images(seed: int = 1) -> Tensor:
    return torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
