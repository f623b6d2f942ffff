"""Packed weights and plans follow what torch does not count: other libraries, processes, conversions."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import swap_tensors
from torch.utils.dlpack import from_dlpack

from fxopt_cpu import FuseConvolutions, PlanRegions, isa
from fxopt_cpu.library import ISAS
from fxopt_cpu.regions.running import plans_of
from fxopt_rewrite import infer_shapes, refresh


class Net(nn.Module):
    """Convolutions and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last, self.linear = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return rows."""
        y = F.relu(self.last(F.relu(self.conv(x))))
        result: Tensor = F.gelu(self.linear(y.mean((2, 3))))
        return result


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


def _through_numpy(weight: nn.Parameter) -> None:
    pytest.importorskip("numpy").multiply(weight.data.numpy(), -2, out=weight.data.numpy())


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.data.mul_(-2),
        _through_numpy,
        lambda weight: from_dlpack(weight.detach().__dlpack__()).mul_(-2),
    ],
    ids=["data", "numpy", "dlpack"],
)
def test_writes_past_torch(pair: tuple[GraphModule, Net], change: Callable[[nn.Parameter], object]) -> None:
    graph_module, net = pair
    for weight in weights(net):
        change(weight)
    agree(graph_module, net)


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


def test_tensors_can_be_swapped(pair: tuple[GraphModule, Net]) -> None:
    """Nothing refers weakly to parameters."""
    graph_module, net = pair
    assert not any(map(weakref.getweakrefs, graph_module.parameters()))
    for weight in weights(net):
        swap_tensors(weight, nn.Parameter(-2 * weight.detach()))  # type: ignore[no-untyped-call]  # untyped in torch
    agree(graph_module, net)
