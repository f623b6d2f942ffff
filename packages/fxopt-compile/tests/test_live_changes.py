"""Whatever changes the weights of a compiled model, each call computes what eager does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from live_models import Attention, Net, agrees, fast_calls, images, network, running
from torch import Tensor, nn

from fxopt_rewrite import refresh


@pytest.fixture(scope="module")
def live() -> tuple[Net, Callable[[Tensor], Tensor], Tensor]:
    """A model, compiled once for all changes here, which follow each other."""
    torch._dynamo.reset()
    return running(network(), images())


@pytest.fixture(autouse=True)
def afresh() -> None:
    """Keep what dynamo has compiled, unlike in other files."""
    torch.manual_seed(0)


def assign_dict(net: Net) -> None:
    net.load_state_dict(network().state_dict(), assign=True)


def set_(net: Net, name: str, value: Callable[[Tensor], Tensor]) -> Tensor:
    """Give a parameter other memory."""
    parameter = net.get_parameter(name)
    parameter.data = value(parameter.detach())
    return parameter


CHANGES: dict[str, Callable[[Net], object]] = {
    "one row of q": lambda net: net.attention.q.weight[0].add_(1),
    "one number of v": lambda net: net.attention.v.weight[3, 5].fill_(9),
    "a bias that is merged": lambda net: net.attention.v.bias.add_(3),
    "a layer that is only packed": lambda net: net.attention.o.weight.mul_(-2),
    "a folded convolution": lambda net: net.conv.weight.mul_(2),
    "a mean": lambda net: net.get_buffer("norm.running_mean").add_(1),
    "a variance": lambda net: net.get_buffer("norm.running_var").mul_(4),
    "batch norm's weight": lambda net: net.norm.weight.mul_(-1),
    "a weight that the graph reads itself": lambda net: net.scale.add_(1),
    "a buffer": lambda net: net.get_buffer("shift").add_(1),
    "data is set": lambda net: set_(net, "attention.q.weight", lambda w: w * 2),
    "data is set twice": lambda net: [set_(net, name, lambda w: w + 1) for name in ["attention.o.weight"] * 2],
    "data is set to a transpose": lambda net: set_(net, "attention.q.weight", lambda w: w.clone().t()),
    "data is written": lambda net: net.attention.q.weight.data.mul_(3),
    "data is written by -=, as PEFT unmerges": lambda net: net.attention.o.weight.data.__isub__(0.5),
    "a new Parameter": lambda net: setattr(net.attention, "k", nn.Linear(8, 8)),
    "a new module": lambda net: setattr(net, "attention", Attention().eval()),
    "a new buffer": lambda net: setattr(net.norm, "running_mean", torch.randn(8)),
    "load_state_dict": lambda net: net.load_state_dict(network().state_dict()),
    "load_state_dict that assigns": assign_dict,
    "init": lambda net: nn.init.normal_(net.attention.v.weight),
    "vector_to_parameters": lambda net: nn.utils.vector_to_parameters(
        torch.randn(sum(each.numel() for each in net.parameters())) / 2, net.parameters()
    ),
    "swapped layers": lambda net: net.attention.__dict__["_modules"].update(q=net.attention.k, k=net.attention.q),
    "tied": lambda net: setattr(net.attention.q, "weight", net.attention.k.weight),
    "double": lambda net: net.double().float(),
    "in inference mode": lambda net: _in_inference_mode(net),
    "SGD": lambda net: _train(net, torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)),
    "Adam, many tensors at once": lambda net: _train(net, torch.optim.Adam(net.parameters(), 0.01, foreach=True)),
    "AdamW, fused": lambda net: _train(net, torch.optim.AdamW(net.parameters(), 0.01, fused=True)),
    "past torch, as NumPy writes": lambda net: _past_torch(net),
}


def _in_inference_mode(net: Net) -> None:
    with torch.inference_mode():
        net.attention.q.weight.add_(1)
        net.get_buffer("norm.running_var").add_(1)


def _train(net: Net, optimizer: torch.optim.Optimizer) -> None:
    with torch.enable_grad():
        net(images()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _past_torch(net: Net) -> None:
    net.attention.q.weight.detach().view(-1).data[1:2].fill_(50.0)
    refresh(net)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_next_call_sees_it(
    change: Callable[[Net], object], live: tuple[Net, Callable[[Tensor], Tensor], Tensor]
) -> None:
    """By the first call after it, and by the rewritten graph that later calls run again."""
    net, fast, x = live
    net.load_state_dict(network().state_dict())
    agrees(fast, net, x)
    before, calls = net(x), fast_calls()
    with torch.no_grad():
        change(net)
    assert not torch.allclose(before, net(x)) or change is CHANGES["double"]
    agrees(fast, net, x)
    assert fast_calls() > calls
