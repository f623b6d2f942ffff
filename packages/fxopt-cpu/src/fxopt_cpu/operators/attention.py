"""`fxopt::attention`: `softmax(scale * query @ key.mT + mask) @ value` of every head, its rows side by side.

Query, key and value may be views of any strides, also of one merged product, which `fxopt::attention_merged` takes
whole. A query whose mask hides every key gives zeros, as torch's `scaled_dot_product_attention` does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fxopt_cpu.operators.definition import Operator


def split(merged: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value (batch, heads, rows, size) as views of their merged product.

    Example:
        >>> query, key, value = split(torch.zeros(2, 5, (4 + 2 * 2) * 16), heads=4, kv_heads=2)
        >>> query.shape, value.shape
        (torch.Size([2, 4, 5, 16]), torch.Size([2, 2, 5, 16]))
    """
    batch, rows, width = merged.shape
    every = merged.view(batch, rows, heads + 2 * kv_heads, width // (heads + 2 * kv_heads)).transpose(1, 2)
    keys = every.narrow(1, heads, kv_heads)
    return every.narrow(1, 0, heads), keys, every.narrow(1, heads + kv_heads, kv_heads)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    if mask is not None and causal:
        later = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).triu(1)
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        mask = mask.expand(shape).masked_fill(later, False if mask.dtype == torch.bool else float("-inf"))
        causal = False
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    rows = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scale)
    return rows.transpose(1, 2).flatten(2)


def _attention_merged(
    merged: Tensor, heads: int, kv_heads: int, mask: Tensor | None, scale: float, causal: bool
) -> Tensor:
    return _attention(*split(merged, heads, kv_heads), mask, scale, causal)


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1] * value.shape[3])


def _fake_merged(merged: Tensor, heads: int, kv_heads: int, *rest: object) -> Tensor:
    return merged.new_empty(*merged.shape[:2], merged.shape[2] // (heads + 2 * kv_heads) * heads)


ATTENTION = Operator(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, bool causal) -> Tensor",
    _fake,
    _attention,
)
ATTENTION_MERGED = Operator(
    "attention_merged(Tensor merged, int heads, int kv_heads, Tensor? mask, float scale, bool causal) -> Tensor",
    _fake_merged,
    _attention_merged,
)
