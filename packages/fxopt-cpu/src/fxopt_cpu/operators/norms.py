"""`fxopt::norm`, `fxopt::add_norm`, `fxopt::embedding_norm`: norms over the last dimension, of sums too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fxopt_cpu.operators.definition import Operator
from fxopt_cpu.operators.linear import normalize


def _norm(
    input: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, kind: int
) -> Tensor:
    return normalize(input if residual is None else input + residual, kind, weight, bias, eps)


def _add_norm(
    input: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: int
) -> tuple[Tensor, Tensor]:
    total = input + residual
    return normalize(total, kind, weight, bias, eps), total


def _embedding_norm(
    ids: Sequence[Tensor],
    tables: Sequence[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: int,
) -> Tensor:
    total = F.embedding(ids[0], tables[0])
    for part, table in zip(ids[1:], tables[1:], strict=True):
        total = total + F.embedding(part, table)
    return normalize(total, kind, weight, bias, eps)


def _fake_norm(input: Tensor, *rest: object) -> Tensor:
    return input.new_empty(input.shape)


def _fake_add_norm(input: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return input.new_empty(input.shape), input.new_empty(input.shape)


def _fake_embedding_norm(ids: Sequence[Tensor], tables: Sequence[Tensor], *rest: object) -> Tensor:
    shape = torch.broadcast_shapes(*(part.shape for part in ids))  # type: ignore[no-untyped-call]  # torch's
    return tables[0].new_empty(*shape, tables[0].shape[1])


NORM = Operator(
    "norm(Tensor input, Tensor? residual, Tensor? weight, Tensor? bias, float eps, int kind) -> Tensor",
    _fake_norm,
    _norm,
)
ADD_NORM = Operator(
    "add_norm(Tensor input, Tensor residual, Tensor? weight, Tensor? bias, float eps, int kind) -> (Tensor, Tensor)",
    _fake_add_norm,
    _add_norm,
)
EMBEDDING_NORM = Operator(
    "embedding_norm(Tensor[] ids, Tensor[] tables, Tensor? weight, Tensor? bias, float eps, int kind) -> Tensor",
    _fake_embedding_norm,
    _embedding_norm,
)
