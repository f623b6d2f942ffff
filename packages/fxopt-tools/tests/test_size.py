"""`Size`: what is counted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

from fxopt_tools import Size


def test_sizes_count_ties_once_and_pass_over_what_is_not_there_yet() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2, bias=False)
            self.b = nn.Linear(2, 2, bias=False)
            self.b.weight = self.a.weight
            self.c = self.a
            self.lazy = nn.LazyLinear(3)

        def forward(self, x: Tensor) -> Any:
            return self.lazy(self.c(self.b(self.a(x))))

    graph_module = symbolic_trace(Tied())
    assert Size.of(graph_module) == Size(nodes=6, modules=3, parameters=3, parameter_bytes=16)
    assert Size.of(graph_module.to(torch.float16)).parameter_bytes == 8
    assert Size.of(symbolic_trace(nn.Sequential(nn.Linear(2, 3, device="meta")))).parameter_bytes == 36
