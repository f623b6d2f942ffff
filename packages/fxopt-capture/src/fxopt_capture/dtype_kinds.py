"""The kinds of dtypes that graphs tell apart: one of a kind does for another."""

from __future__ import annotations

import torch


def kind_of(dtype: torch.dtype) -> str:
    """Return ``bool``, ``integer``, ``floating`` or ``complex``."""
    if dtype.is_complex or dtype.is_floating_point:
        return "complex" if dtype.is_complex else "floating"
    return "bool" if dtype is torch.bool else "integer"


def dtypes_of(kind: str) -> frozenset[torch.dtype]:
    """Return all dtypes of a kind.

    >>> torch.bfloat16 in dtypes_of("floating"), dtypes_of("bool")
    (True, frozenset({torch.bool}))
    """
    return _BY_KIND[kind]


_ALL = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
_BY_KIND = {
    kind: frozenset(dtype for dtype in _ALL if kind_of(dtype) == kind)
    for kind in ("bool", "integer", "floating", "complex")
}
