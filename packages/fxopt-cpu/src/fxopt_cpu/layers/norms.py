"""`SumNorm` and `EmbeddingNorm`: norms of sums, in one operator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt_cpu.layers.epilogue import NORM_CODES, Activation, Norm, check_epilogue
from fxopt_cpu.layers.thawing import Layer
from fxopt_cpu.library import isa
from fxopt_cpu.operators.definition import without_gradient
from fxopt_rewrite import check_settings, is_plain_tensor, needs_gradient, runs_plainly

NORM: Callable[..., Tensor] = without_gradient(torch.ops.fxopt.norm.default)
EMBEDDING_NORM: Callable[..., Tensor] = without_gradient(torch.ops.fxopt.embedding_norm.default)
_FLOAT = torch.float32
MOST_TABLES = 8


class _Normed(Layer):
    """Base of both layers: a norm over the last dimension, of so many features."""

    only_computes = True
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self, features: int, norm: tuple[Any, ...], *, weight: bool = False, bias: bool = False, device: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.features = features
        self._norm: tuple[Any, ...] = tuple(Norm(*norm))
        for key, given in (("weight", weight), ("bias", bias)):
            self.register_parameter(key, nn.Parameter(torch.ones(features, device=device)) if given else None)

    def check_attributes(self) -> None:
        """Raise a ValueError if a file has set values that no operator takes."""
        check_settings(self, features=0)
        check_epilogue(Activation(), self.norm)

    @property
    def norm(self) -> Norm:
        """The norm."""
        return Norm(*self._norm)


class SumNorm(_Normed):
    """``norm(x)`` or ``norm(x + residual)``: a layer norm or RMS norm over the last dimension.

    Args:
        features: size of that dimension.
        norm: its name and eps, as `Norm` has them.
        weight: whether it has a weight.
        bias: whether it has a bias.

    >>> SumNorm(2, ("layer", 0.0))(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 3.0]]))
    tensor([[-1.,  1.]])
    """

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the norm."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        name, eps = self._norm
        same = residual is None or residual.shape == input.shape
        if same and _takes(self.features, input, residual, weight, bias):
            return NORM(input, residual, weight, bias, eps, NORM_CODES[name])
        return Norm(name, eps)(input if residual is None else input + residual, weight, bias)

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"{self.features}, {self._norm[0]}, eps={self._norm[1]:g}"


class EmbeddingNorm(_Normed):
    """``norm(tables[0][ids[0]] + tables[1][ids[1]] + ...)``: rows of several tables, and their norm.

    The sizes of ``ids`` broadcast. The norm is over the last dimension, or absent.

    Args:
        entries: number of rows of each table.
        padding: for each table the row that gets no gradient, or -1.
        features: size of a row.
        norm: its name and eps, as `Norm` has them; empty for none.
        weight: whether the norm has a weight.
        bias: whether the norm has a bias.

    >>> EmbeddingNorm((10, 5), 4, ("layer", 1e-5))(torch.tensor([[1, 2]]), torch.tensor([[0, 4]])).shape
    torch.Size([1, 2, 4])
    """

    own_parameters: ClassVar = frozenset({"weight", "bias", *(f"table_{place}" for place in range(MOST_TABLES))})

    def __init__(
        self, entries: tuple[int, ...], features: int, norm: tuple[Any, ...] = (), *,
        padding: tuple[int, ...] = (), weight: bool = False, bias: bool = False, device: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(features, norm, weight=weight, bias=bias, device=device)
        self.entries, self.padding = entries, padding or (-1,) * len(entries)
        for place, rows in enumerate(entries):
            self.register_parameter(f"table_{place}", nn.Parameter(torch.zeros(rows, features, device=device)))

    def check_attributes(self) -> None:
        """Raise a ValueError if a file has set values that no operator takes."""
        super().check_attributes()
        check_settings(self, entries=(0, ...), padding=(-1, ...))
        fit = all(row < rows for row, rows in zip(self.padding, self.entries, strict=False))
        if not fit or not 1 <= len(self.entries) == len(self.padding) <= MOST_TABLES:
            found = f"tables have {self.entries} rows, and their padding is {self.padding}"
            raise ValueError(f"{found}, expected one of its rows, or -1, for each of 1 to {MOST_TABLES} tables")

    @property
    def tables(self) -> list[nn.Parameter | None]:
        """The tables, in order."""
        return [self._parameters[f"table_{place}"] for place in range(len(self.entries))]

    def forward(self, *ids: Tensor) -> Tensor:
        """Return the rows."""
        held, tables = self._parameters, self.tables
        weight, bias, (name, eps) = held["weight"], held["bias"], self._norm
        if all(is_plain_tensor(each, torch.int64) for each in ids) and _takes(self.features, *tables, weight, bias):
            with suppress(RuntimeError):  # an index is out of range, for which torch has an error of its own
                return EMBEDDING_NORM(list(ids), tables, weight, bias, eps, NORM_CODES[name])
        total: Any = None
        for each, table, row in zip(ids, tables, self.padding, strict=True):
            assert table is not None
            part = F.embedding(each, table, None if row < 0 else row)
            total = part if total is None else total + part
        return Norm(name, eps)(total, weight, bias)

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"{self.entries}, {self.features}, {self._norm[0]}, eps={self._norm[1]:g}"


def _takes(features: int, *tensors: Tensor | None) -> bool:
    """Return whether the operators take these in this call."""
    if isa() is None or not runs_plainly() or needs_gradient(*tensors):
        return False
    return all(
        each is None or (each.dtype is _FLOAT and each.is_cpu and each.numel() and each.shape[-1:] == (features,)
                         and each.layout is torch.strided and type(each) in (Tensor, nn.Parameter))
        for each in tensors
    )  # fmt: skip
