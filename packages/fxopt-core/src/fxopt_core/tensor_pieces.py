"""Pieces of tensors: cut out with strides of their own, and joined again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fxopt_core.ledger import Piece
from fxopt_core.row_copies import copy_into


def copied(piece: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """Return a copy with these strides; else contiguous, or in the memory format that it was brought into since."""
    if strides is None and piece.dim() > 2 and not piece.is_contiguous():
        return piece.clone()
    empty = piece.new_empty(piece.shape) if strides is None else piece.new_empty_strided(piece.shape, strides)
    copy_into(empty, piece)
    return empty


def joined(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, parts: Iterable[tuple[Piece, Tensor]]
) -> Tensor:
    """Return the tensor that parts were cut out of."""
    whole = torch.empty(shape, dtype=dtype, device=device)
    for piece, values in parts:
        piece.take(whole).copy_(values)
    return whole
