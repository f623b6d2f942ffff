"""Small models of linear layers: sites for passes on them, and everything that makes a site illegal."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize


class Attention(nn.Module):
    """Grouped-query attention: linear layers of unequal size on one input, a division by a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x).unflatten(-1, (2, 4)), self.k(x).unflatten(-1, (1, 4)), self.v(x).unflatten(-1, (1, 4))
        # The root of 12: the inverse of a power of two would be exact, and hide rounding.
        scores = torch.einsum("bihd,bjgd->bhij", q, k) / math.sqrt(4.0 * 3)
        mixed = torch.einsum("bhij,bjgd->bihd", scores.softmax(-1), v)
        result: Tensor = self.out(mixed.flatten(2))
        return result


class Pair(nn.Module):
    """Two linear layers that share their input."""

    def __init__(self, *, q_bias: bool = True, k_bias: bool = True) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 4, bias=q_bias), nn.Linear(4, 2, bias=k_bias)

    def forward(self, x: Tensor) -> Any:
        return self.q(x) * 2.0, self.k(x) * 2.0


class Keywords(Pair):
    """Layers are called by keyword, and so may be the model."""

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Any:
        q, k = self.q(input=x), self.k(input=x)
        return {"q": q if scale is None else q * scale, "more": (k, [k + 1.0])}


class CalledTwice(Pair):
    """One layer is also called on another value, and the other one under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.k

    def forward(self, x: Tensor) -> Any:
        return self.q(x), self.k(x), self.q(x + 1.0), self.again(x - 1.0)


class Tied(nn.Module):
    """The weight of a layer is that of an embedding, as in language models; two layers share one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4, padding_idx=3)
        self.inner, self.head, self.other = nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(4, 6)
        self.head.weight = self.embedding.weight
        self.other.bias = self.head.bias

    def forward(self, x: Tensor) -> Any:
        y = self.inner(self.embedding(x))
        return self.head(y), self.other(y)


class WritesBetween(Pair):
    """The input is written in place between the two layers, and the caller sees it."""

    def forward(self, x: Tensor) -> Any:
        y = self.q(x)
        x.mul_(2.0)
        return y, self.k(x), F.relu(x + 0.0, inplace=True)


class WritesThroughView(Pair):
    """The result of one layer is written through a view, after it has been read."""

    def forward(self, x: Tensor) -> Any:
        y = self.q(x)
        z = y + 0.0
        y.narrow(-1, 0, 2).fill_(0.5)
        return self.k(y) + 0.0, z, y.view(-1)


class Guarded(nn.Module):
    """Layers that stay: with a hook, a hook on a gradient, a parametrization, and of a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.hooked, self.heard, self.scaled, self.doubling = *(nn.Linear(4, 4) for _ in range(3)), Doubling(4, 2)
        self.hooked.register_forward_hook(doubled)
        self.heard.weight.register_hook(halved)  # type: ignore[no-untyped-call]  # it has no annotations in torch
        parametrize.register_parametrization(self.scaled, "weight", Scaled())

    def forward(self, x: Tensor) -> Any:
        return self.hooked(x) * 2.0, self.heard(x) * 2.0, self.scaled(x) * 2.0, self.doubling(x) * 2.0


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Double what a layer returns."""
    return output * 2.0


def halved(gradient: Tensor) -> Tensor:
    """Halve a gradient."""
    return gradient * 0.5


class Doubling(nn.Linear):
    """A linear layer that doubles."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2.0


class Scaled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 3.0


def half_frozen() -> nn.Module:
    """Return a pair in which one weight does not train."""
    pair = Pair()
    pair.q.weight.requires_grad_(False)
    return pair


class AtRoot(nn.Module):
    """Parameters and a buffer, which is not saved, of the model itself."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.register_buffer("table", torch.randn(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.table + self.weight.sum()


class Hub(nn.Module):
    """One value with many users, of all kinds."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 2) for _ in range(3 * times)])

    def forward(self, x: Tensor) -> Any:
        y = x.relu()
        return [layer(y) / 3.0 for layer in self.layers], [y * 2.0 + y, y / 7.0], y.sum(-1)


class Sizes(Pair):
    """Arithmetic on sizes, and shapes made of the results."""

    def forward(self, x: Tensor) -> Any:
        return self.q(x).view(x.shape[0], 2, 2), self.k(x).reshape(x.size(0), 2).t().contiguous()


class Unused(Pair):
    """The result of one layer is not used."""

    def forward(self, x: Tensor) -> Any:
        self.k(x)
        return self.q(x)


class Block(nn.Module):
    """Linear layers with a common input, a division and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.last, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.q(x) + self.k(x)) / 5.0
        return self.norm(self.last(y)) * y
