"""Packed weights and plans follow what torch does not count: other libraries, processes, conversions."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from region_plans import plans_of
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_cpu import FuseConvolutions, PlanRegions, isa
from fxopt_cpu.library import ISAS
from fxopt_rewrite import infer_shapes, refresh


class Net(nn.Module):
    """Convolutions and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last, self.linear = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        """Return rows."""
        y = F.relu(self.last(F.relu(self.conv(x))))
        return F.gelu(self.linear(y.mean((2, 3))))


def made(kind: str) -> tuple[GraphModule, Net]:
    """Return a model that has run until everything is packed, and the same weights, plain."""
    net = Net().eval()
    graph_module = FuseConvolutions()(infer_shapes(torch.fx.symbolic_trace(net), torch.randn(3, 4, 8, 8)))
    if kind == "plans":
        graph_module = PlanRegions()(graph_module)
    agree(graph_module, net)
    assert bool(plans_of(graph_module)) == (kind == "plans" and isa() in ISAS[1:])
    return graph_module, net


@pytest.fixture(params=["layers", "plans"])
def pair(request: pytest.FixtureRequest) -> tuple[GraphModule, Net]:
    return made(request.param)


def agree(graph_module: GraphModule, net: Net) -> None:
    x = torch.randn(3, 4, 8, 8)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(graph_module(x), net(x), rtol=1e-4, atol=1e-4)


def weights(net: Net) -> list[nn.Parameter]:
    return [each for each in net.parameters() if each.dim() > 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_writes_of_another_process() -> None:
    pairs = [made("layers"), made("plans")]
    for graph_module, net in pairs:
        graph_module.share_memory()
        agree(graph_module, net)
    child = os.fork()
    if not child:
        for weight in (weight for _, net in pairs for weight in weights(net)):
            weight.data.mul_(-2)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for each in pairs:
        agree(*each)


def test_single_numbers_are_seen_after_refresh(pair: tuple[GraphModule, Net]) -> None:
    """What nothing shows."""
    graph_module, net = pair
    for weight in weights(net):
        weight.data.view(-1)[3].add_(50)
    refresh(graph_module)
    agree(graph_module, net)
    net.last.weight.data.view(-1)[5].add_(50)
    refresh(graph_module.get_submodule("last_packed"))
    agree(graph_module, net)
