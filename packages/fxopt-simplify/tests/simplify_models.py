"""Models in which there is something to simplify, for all tests of the family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(0, 16, (2, 5), generator=torch.Generator().manual_seed(1))


class Masked(nn.Module):
    """An encoder layer as Hugging Face's models have them: positions, token types and masks made at each call."""

    positions: Tensor
    types: Tensor

    def __init__(self, *, causal: bool = False) -> None:
        super().__init__()
        self.words, self.places, self.kinds = nn.Embedding(16, 8), nn.Embedding(12, 8), nn.Embedding(2, 8)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.causal = causal
        self.register_buffer("positions", torch.arange(12).unsqueeze(0), persistent=False)
        self.register_buffer("types", torch.zeros(1, 12, dtype=torch.long), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length = tokens.shape[0], tokens.shape[1]
        kinds = self.kinds(self.types[:, :length].expand(batch, length))
        x = self.words(tokens) + self.places(self.positions[:, :length]) + kinds
        ones = torch.ones((batch, length), dtype=torch.long, device=tokens.device)
        extended = (1.0 - ones[:, None, None, :].to(torch.float32)) * torch.finfo(torch.float32).min
        if self.causal:
            row = torch.arange(length, device=tokens.device)
            extended = extended.masked_fill(row[None, :] > row[:, None], -1e9)
        q, k, v = (each(x).view(batch, length, 2, 4).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=extended).transpose(1, 2).contiguous()
        return F.dropout(y.view(batch, length, 8) * 1.0, 0.1, training=False)


class Rotary(nn.Module):
    """Rotary positions of a buffer of frequencies, as Llama's."""

    inverse: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", 1.0 / 10 ** (torch.arange(0, 4, 2).float() / 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[0], dtype=torch.float32)
        angles = places[:, None] * self.inverse[None, :]
        angles = torch.cat((angles, angles), dim=-1)
        turned = torch.cat((-x[:, 2:], x[:, :2]), dim=-1)
        return x * angles.cos() + turned * angles.sin()


class Repeats(nn.Module):
    """The same layers and functions are called twice with equal arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.GELU()

    def forward(self, x: Tensor) -> Any:
        one = self.act(self.fc(x)) + torch.arange(x.shape[1]).float()
        other = self.act(self.fc(x)) * torch.arange(x.shape[1]).float()
        torch.sigmoid(other).abs()
        return one - other.reshape(other.shape) * torch.ones(4, 4).tril().sum(0)


class Attends(nn.Module):
    """Attention written out: products, a softmax and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (each(x).unflatten(-1, (2, 2)).transpose(0, 1).unsqueeze(0) for each in (self.q, self.k, self.v))
        return torch.softmax(q @ k.transpose(-2, -1) * 0.5, dim=-1) @ v


class Product(nn.Linear):
    """Writes a linear layer as a product."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Standardised(nn.Conv1d):
    """Its weight has the mean 0 and the variance 1, channel by channel."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0).reshape_as(self.weight)
        return F.conv1d(x, weight, self.bias)


class Adapted(nn.Linear):
    """LoRA, written as one weight."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.lora_a, self.lora_b = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + 0.5 * (self.lora_b @ self.lora_a), self.bias)


WEIGHED: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: weight_norm(nn.Conv1d(4, 6, 3)),
    "weight norm, transposed": lambda: nn.Sequential(weight_norm(nn.ConvTranspose1d(4, 6, 4, 2)), nn.ReLU()),
    "standardised": lambda: Standardised(4, 6, 3),
    "low rank": Adapted,
    "spectral norm": lambda: spectral_norm(nn.Linear(8, 6)),
}
"""Layers that read a weight computed from weights."""
