"""`RowAttention` and `MergedAttention`: attention that writes contiguous rows, in one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from fxopt_cpu.layers.thawing import Layer
from fxopt_cpu.library import isa
from fxopt_cpu.operators.attention import plain_attention, split
from fxopt_cpu.operators.definition import without_gradient
from fxopt_rewrite import check_settings, is_plain_tensor, needs_gradient, runs_plainly

ATTENTION: Callable[..., Tensor] = without_gradient(torch.ops.fxopt.attention.default)
ATTENTION_MERGED: Callable[..., Tensor] = without_gradient(torch.ops.fxopt.attention_merged.default)
LARGEST_HEAD = 256
_FLOAT = torch.float32


class _Attention(Layer):
    """Base of both layers: settings that are plain data, and no parameters."""

    only_computes = True
    own_parameters: ClassVar = frozenset[str]()
    own_buffers: ClassVar = frozenset[str]()

    #: Whether products take bfloat16, from 49 queries on, where the processor has AMX.
    rounded = False

    def __init__(self, scale: float, causal: bool) -> None:
        super().__init__()
        self.scale, self.causal = scale, causal

    def check_attributes(self) -> None:
        """Raise a ValueError if a file has set values that no operator takes."""
        check_settings(self, scale=float, causal=bool, rounded=bool)


class RowAttention(_Attention):
    """``softmax(scale * query @ key.T + mask) @ value``, with the heads of each row beside one another.

    ``query`` is (batch, heads, rows, size), ``key`` and ``value`` (batch, heads, columns, size), where several heads of
    the query may share one of theirs; ``mask`` broadcasts to (batch, heads, rows, columns) and is added to the
    scores, or is true where a row attends. The result is (batch, rows, heads * size). Inputs may have any strides.

    Args:
        scale: factor of the scores.
        causal: whether each row attends only to the columns up to its own index.

    >>> attention = RowAttention(scale=1.0, causal=True)
    >>> attention(*torch.ones(3, 1, 2, 5, 16)).shape
    torch.Size([1, 5, 32])
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the rows."""
        fits = query.dim() == 4 and query.shape[-1] <= LARGEST_HEAD and _belong_together(query, key, value)
        if fits and _takes(query, key, value) and _takes_mask(mask):
            return ATTENTION(query, key, value, mask, self.scale, self.causal, self.rounded)
        return plain_attention(query, key, value, mask, self.scale, self.causal)


class MergedAttention(_Attention):
    """`RowAttention` of queries, keys and values that are the columns of one product.

    ``merged`` is (batch, rows, (heads + 2 * kv_heads) * size).

    Args:
        heads: number of heads of the query.
        kv_heads: number of heads of key and value.
        scale: factor of the scores.
        causal: whether each row attends only to the columns up to its own index.

    >>> attention = MergedAttention(2, 1, scale=1.0, causal=False)
    >>> attention(torch.ones(1, 5, 64)).shape
    torch.Size([1, 5, 32])
    """

    def __init__(self, heads: int, kv_heads: int, scale: float, causal: bool) -> None:
        super().__init__(scale, causal)
        self.heads, self.kv_heads = heads, kv_heads

    def check_attributes(self) -> None:
        """Raise a ValueError if a file has set values that no operator takes."""
        super().check_attributes()
        check_settings(self, heads=1, kv_heads=1)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads} and kv_heads {self.kv_heads}, expected a divisor of heads")

    def forward(self, merged: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the rows."""
        if _takes(merged) and _takes_mask(mask) and merged.dim() == 3:
            return ATTENTION_MERGED(merged, self.heads, self.kv_heads, mask, self.scale, self.causal, self.rounded)
        return plain_attention(*split(merged, self.heads, self.kv_heads), mask, self.scale, self.causal)

    def extra_repr(self) -> str:
        """Return the settings."""
        rounded = ", rounded=True" if self.rounded else ""
        return f"heads={self.heads}, kv_heads={self.kv_heads}, scale={self.scale:g}, causal={self.causal}{rounded}"


def _takes(*tensors: Tensor) -> bool:
    """Return whether the operator takes these in this call."""
    if isa() is None or not runs_plainly() or needs_gradient(*tensors):
        return False
    return all(is_plain_tensor(each, _FLOAT) and each.numel() and each.stride(-1) == 1 for each in tensors)


def _belong_together(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the batch sizes are equal, and the heads equal or in groups."""
    batch, heads, _, size = query.shape
    same = key.shape == (batch, key.shape[1], value.shape[2], size) and value.shape[:2] == key.shape[:2]
    return same and key.shape[1] > 0 and heads % key.shape[1] == 0


def _takes_mask(mask: Tensor | None) -> bool:
    return mask is None or (
        (is_plain_tensor(mask, torch.bool) or is_plain_tensor(mask, _FLOAT)) and not needs_gradient(mask)
    )
