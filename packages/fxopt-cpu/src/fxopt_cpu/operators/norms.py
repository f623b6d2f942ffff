"""`fxopt::norm`, `fxopt::embedding_norm`: norms over the last dimension, of sums too."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fxopt_cpu.operators.definition import Operator
from fxopt_cpu.operators.linear import normalize


def _norm(
    input: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, kind: int
) -> Tensor:
    total = input.clone() if residual is None else input + residual
    return normalize(total.contiguous(), kind, weight, bias, eps)


def _embedding_norm(
    ids: Sequence[Tensor], tables: Sequence[Tensor], weight: Tensor | None, bias: Tensor | None, eps: float, kind: int
) -> Tensor:
    rows = itertools.starmap(F.embedding, zip(ids, tables, strict=True))
    return normalize(functools.reduce(torch.add, rows), kind, weight, bias, eps)


NORM = Operator(
    "norm(Tensor input, Tensor? residual, Tensor? weight, Tensor? bias, float eps, int kind) -> Tensor", _norm
)
EMBEDDING_NORM = Operator(
    "embedding_norm(Tensor[] ids, Tensor[] tables, Tensor? weight, Tensor? bias, float eps, int kind) -> Tensor",
    _embedding_norm,
)
