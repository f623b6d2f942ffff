"""The kinds of dtypes: a graph that takes one dtype of a kind usually takes the others too."""

from __future__ import annotations

import torch


def dtype_kind(dtype: torch.dtype) -> str:
    """Return ``bool``, ``integer``, ``floating`` or ``complex``.

    >>> dtype_kind(torch.bfloat16), dtype_kind(torch.uint8)
    ('floating', 'integer')
    """
    if dtype.is_complex or dtype.is_floating_point:
        return "complex" if dtype.is_complex else "floating"
    return "bool" if dtype is torch.bool else "integer"
