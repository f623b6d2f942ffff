"""Small models for the tests of the backend, and what they promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fxopt_compile

EVERYTHING = "fold-batch-norm,merge-linears,cpu-inference"
"""All that makes weights of weights: folds, merges, and packed layers."""


class Attention(nn.Module):
    """Three layers that merge, and one that does not."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.o(torch.softmax(q @ k.mT, -1) @ v)


class Net(nn.Module):
    """A convolution with batch norm, attention, and a weight that the graph reads itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.attention = Attention()
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.norm(self.conv(x))).flatten(2).mT
        return self.attention(y) * self.scale + self.shift


def network() -> Net:
    """A model in evaluation mode, with statistics that are no identity."""
    net = Net().eval()
    nn.init.uniform_(net.get_buffer("norm.running_mean"), -1, 1)
    nn.init.uniform_(net.get_buffer("norm.running_var"), 0.5, 2)
    return net


def images(batch: int = 2, size: int = 6) -> Tensor:
    """Inputs of `Net`."""
    return torch.randn(batch, 3, size, size)


def compiled(model: Any, pipeline: str = EVERYTHING, **options: Any) -> Any:
    """Compile a model by the backend."""
    keywords = {key: options.pop(key) for key in ("dynamic", "fullgraph", "mode") if key in options}
    return torch.compile(model, backend="fxopt", options={"pipeline": pipeline, **options}, **keywords)


def same(found: Any, expected: Any) -> None:
    """Compare results of a rewritten graph with those of eager."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def agrees(fast: Callable[..., Any], eager: Callable[..., Any], *inputs: Any, calls: int = 3) -> None:
    """Check that several calls in a row compute what eager does, without gradients."""
    with torch.no_grad():
        expected = eager(*inputs)
        for _ in range(calls):
            same(fast(*inputs), expected)


def running(net: Any, x: Tensor, **options: Any) -> tuple[Any, Any, Tensor]:
    """A model, the same one compiled after calls that computed what eager does, and their input."""
    fast = compiled(net, **options)
    agrees(fast, net, x)
    return net, fast, x


def fast_calls(model: nn.Module | None = None) -> int:
    """How many calls ran a rewritten graph."""
    return sum(graph.calls for graph in fxopt_compile.history(model))


def rewrites(model: nn.Module | None = None) -> dict[str, int]:
    """How many sites each pass rewrote, over all graphs."""
    found: dict[str, int] = {}
    for graph in fxopt_compile.history(model):
        for record in graph.records:
            if record.rewrites:
                found[record.pass_name] = found.get(record.pass_name, 0) + len(record.rewrites)
    return found
