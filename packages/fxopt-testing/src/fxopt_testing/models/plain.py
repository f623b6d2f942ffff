"""Small models of functions and methods: arithmetic, in-place operations, views, control flow by shapes."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Arithmetic(nn.Module):
    """Products, sums, differences and powers, by operators, functions and methods."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        z = x * y + torch.mul(x, 3.0) - y.mul(2.0)
        return operator.add(z, x), torch.sub(z, y, alpha=2), -z * 2.0


class Quotients(nn.Module):
    """Divisions by constants that are safe to invert, in all spellings."""

    def forward(self, x: Tensor) -> Any:
        y = (x + 1.0).div_(5.0)
        return x / 3.0, torch.div(x, 7.0), x.true_divide(0.1), y, x.div(other=8.0)


class RoundedQuotients(nn.Module):
    """Divisions whose last bit matters, or that divide sizes."""

    def forward(self, x: Tensor) -> Any:
        rounded = torch.floor(x / 3.0), (x / 7.0).round(), x / 3.0 > 1.0, torch.div(x, 3.0, rounding_mode="floor")
        return *rounded, x * (x.shape[0] / 4), x / (x.abs() + 1.0), (x / 3.0).to(torch.int32)


class InPlace(nn.Module):
    """In-place operations on values that were computed and read before."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        y = x * 2.0
        z = y * 3.0
        y.add_(1.0)
        w = y * 3.0
        return self.act(z), w, self.act(y), w * 1.0


class WritesInput(nn.Module):
    """The caller's tensor is written: through itself, and through a view of it."""

    def forward(self, x: Tensor) -> Any:
        before = x * 1.0
        x.mul_(0.5)
        x.narrow(-1, 0, 1).add_(1.0)
        return before, x + 0.0


class Views(nn.Module):
    """Views, permutations, and a result that is a view of the input."""

    def forward(self, x: Tensor) -> Any:
        y = (x * 2.0).transpose(0, 1)
        return y.contiguous().view(4, -1), y[1:3], x.unsqueeze(1).expand(-1, 2, -1), x.view(-1, 2, 2)


class Repeated(nn.Module):
    """The same value computed twice, and one that is not used."""

    def forward(self, x: Tensor) -> Any:
        a, b = torch.relu(x * 2.0), torch.relu(x * 2.0)
        torch.sigmoid(a)
        return a + b, F.relu(torch.relu(x))


class BySize(nn.Module):
    """The batch size goes into the result."""

    def forward(self, x: Tensor) -> Any:
        return x * x.size(0), x.new_zeros(x.size(0), 2) + 1.0, x.sum(0, keepdim=True) * 2.0


class Structured(nn.Module):
    """Arguments by keyword with defaults, and a nested result with a number and a None in it."""

    def forward(self, x: Tensor, scale: float = 2.0, *, mask: Tensor | None = None) -> Any:
        y = x * scale if mask is None else x * scale * mask
        return {"y": y, "more": [y + 1.0, (x * 1.0, None, 3)]}


class Passed(nn.Module):
    """The input itself is returned, and something computed from it."""

    def forward(self, x: Tensor) -> Any:
        return x, x * x


class Opaque(nn.Module):
    """A module of torch that a tracer calls as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.attention(x, x, x, need_weights=False)[0] * 2.0)


class Products(nn.Module):
    """A chain of products, as long as asked for, and one value that all of them read."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Any:
        y, all_of_them = x, []
        for _ in range(self.times):
            y = torch.tanh(y * 0.5 + x) / 3.0
            all_of_them.append(F.relu(y * x))
        return all_of_them


def embedding() -> nn.Module:
    """Return layers with settings that a copy of them loses easily."""
    return nn.Sequential(nn.Embedding(6, 4, max_norm=0.5), nn.LayerNorm(4, eps=0.1), nn.Softmax(1))
