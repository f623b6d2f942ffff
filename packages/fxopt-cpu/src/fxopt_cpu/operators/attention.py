"""`fxopt::attention`: `softmax(scale * query @ key.mT + mask) @ value` of every head, its rows side by side.

Query, key and value may be views of any strides, also of one merged product, which `fxopt::attention_merged` takes
whole. A query whose mask hides every key gives zeros, as torch's `scaled_dot_product_attention` does. With `rounded`,
the operands of both products are rounded to bfloat16 where the processor has AMX.
"""

from __future__ import annotations

from typing import Any

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
    return every.narrow(1, 0, heads), every.narrow(1, heads, kv_heads), every.narrow(1, heads + kv_heads, kv_heads)


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool, rounded: bool = False
) -> Tensor:
    """Compute `fxopt::attention` with torch's own functions, without rounding."""
    grouped = bool(0 < key.shape[1] != query.shape[1] and query.shape[1] % key.shape[1] == 0)
    settings: dict[str, Any] = {"scale": scale, "enable_gqa": grouped}
    # torch's function refuses a mask together with `is_causal`.
    if mask is not None and causal:
        # As in torch's causal attention, row i reads columns 0 to i, however many columns there are.
        later = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).triu(1)
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        mask = mask.expand(shape).masked_fill(later, False if mask.dtype == torch.bool else float("-inf"))
        causal = False
    rows = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, **settings)
    return rows.transpose(1, 2).flatten(2)


_SETTINGS = "Tensor? mask, float scale, bool causal, bool rounded=False) -> Tensor"
ATTENTION = Operator(f"attention(Tensor query, Tensor key, Tensor value, {_SETTINGS}", plain_attention)
ATTENTION_MERGED = Operator(
    f"attention_merged(Tensor merged, int heads, int kv_heads, {_SETTINGS}",
    lambda merged, heads, kv_heads, *others: plain_attention(*split(merged, heads, kv_heads), *others),
)
