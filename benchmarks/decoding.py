"""A decoder that runs for one token: projections that share their inputs, attention over a cache, a gated MLP."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, as in Llama.

    Attributes:
        width: of the hidden states.
        inner: of the MLP.
        heads: of queries.
        groups: heads of keys and values.
        layers: how many.
        cached: positions in the cache.
    """

    width: int
    inner: int
    heads: int
    groups: int
    layers: int
    cached: int = 256


MEDIUM = Shape(width=1024, inner=2816, heads=16, groups=4, layers=4)
"""Layers of a model of half a billion parameters."""
TINY = Shape(width=32, inner=64, heads=4, groups=2, layers=2, cached=8)


class Layer(nn.Module):
    """One layer; it does not write the cache, whose contents do not matter here."""

    def __init__(self, shape: Shape, batch: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = shape.heads, shape.groups, shape.width // shape.heads
        kept = shape.groups * self.size
        self.before, self.between = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.q, self.o = (nn.Linear(shape.width, shape.width, bias=False) for _ in "qo")
        self.k, self.v = (nn.Linear(shape.width, kept, bias=False) for _ in "kv")
        self.gate, self.up = (nn.Linear(shape.width, shape.inner, bias=False) for _ in "gu")
        self.down = nn.Linear(shape.inner, shape.width, bias=False)
        self.keys, self.values = (nn.Buffer(torch.randn(batch, shape.groups, shape.cached, self.size)) for _ in "kv")

    def forward(self, x: Tensor) -> Tensor:
        """One token of each sequence: (batch, 1, width)."""
        h = self.before(x)
        q = self.q(h).view(-1, 1, self.heads, self.size).transpose(1, 2)
        k = self.k(h).view(-1, 1, self.groups, self.size).transpose(1, 2)
        v = self.v(h).view(-1, 1, self.groups, self.size).transpose(1, 2)
        keys, values = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
        mixed = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.between(x)
        result: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return result


def decoder(shape: Shape, batch: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Module:
    """Make a decoder in evaluation mode, the same every time, with a cache for this many sequences."""
    torch.manual_seed(0)
    with torch.device(device):
        layers = [Layer(shape, batch) for _ in range(shape.layers)]
    return nn.Sequential(*layers).to(dtype).eval()
