"""Which readers make the last bit of a quotient matter: those that round or compare it, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt_arith import ChangeTrueDivToMulByInverse
from fxopt_core import history
from fxopt_testing.rewrites import graph_of, refused

aten = torch.ops.aten


class Apply(nn.Module):
    """A function of a tensor and a constant as a model of the tensor."""

    def __init__(self, function: Callable[[Tensor, float], Any], constant: float) -> None:
        super().__init__()
        self.function, self.constant = function, constant

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.constant)


class Behind(nn.Module):
    """A module behind a quotient."""

    def __init__(self, module: nn.Module, constant: float, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module, self.constant, self.read = module, constant, read

    def forward(self, x: Tensor) -> Any:
        return self.read(self.module(x / self.constant))


def image() -> Tensor:
    return torch.rand(2, 4, 4)


def square() -> Tensor:
    return torch.rand(4, 4)


JUMPING: dict[str, Callable[[Tensor, float], Any]] = {
    "threshold": lambda x, c: F.threshold(x / c, 0.5, 0),
    "threshold in place": lambda x, c: F.threshold(x / c, 0.5, 0, inplace=True),
    "torch.threshold": lambda x, c: torch.threshold(x / c, 0.5, 0),
    "hardshrink": lambda x, c: F.hardshrink(x / c, 0.5),
    "torch.hardshrink": lambda x, c: torch.hardshrink(x / c),
    "hardshrink method": lambda x, c: (x / c).hardshrink(0.5),
    "logical_and": lambda x, c: torch.logical_and(x / c, x),
    "all": lambda x, c: torch.all(x / c),
    "any": lambda x, c: (x / c).any(1),
    "condition": lambda x, c: torch.where(x / c > 0.1, x, 0),
    "mask": lambda x, c: x.masked_fill((x / c).bool(), 0),
    "isin": lambda x, c: torch.isin(x / c, x),
    "fmod": lambda x, c: torch.fmod(x / c, 0.1),
    "floor_divide": lambda x, c: torch.floor_divide(x / c, 0.1),
    "bucketize": lambda x, c: torch.bucketize(x / c, torch.arange(3.0)),
    "searchsorted": lambda x, c: torch.searchsorted(x, x / c),
    "histc": lambda x, c: torch.histc(x / c, 4, 0, 1),
    "multinomial": lambda x, c: torch.multinomial(x / c, 2),
    "bernoulli": lambda x, c: torch.bernoulli(x / c),
    "sum of integers": lambda x, c: torch.sum(x / c, dtype=torch.int64),
}


@pytest.mark.parametrize("name", JUMPING)
def test_quotients_before_a_jump_stay(name: str) -> None:
    graph_module = torch.fx.symbolic_trace(Apply(JUMPING[name], 7))
    ChangeTrueDivToMulByInverse()(graph_module, expect=0)
    assert {reason for _, reason in refused(graph_module)} == {"rounded-quotient"}
    exact = torch.fx.symbolic_trace(Apply(JUMPING[name], 8))
    ChangeTrueDivToMulByInverse()(exact, expect=1)


MODULES: dict[str, tuple[nn.Module, Callable[[Any], Any], int]] = {
    "Threshold": (nn.Threshold(0.5, 0), lambda y: y, 0),
    "Hardshrink": (nn.Hardshrink(), lambda y: y, 0),
    "Softshrink": (nn.Softshrink(), lambda y: y, 1),
    "RReLU": (nn.RReLU(), lambda y: y, 1),
    "MaxPool1d": (nn.MaxPool1d(2), lambda y: y, 1),
    "MaxPool2d, values": (nn.MaxPool2d(2, return_indices=True), lambda y: y[0], 1),
    "AdaptiveMaxPool2d": (nn.AdaptiveMaxPool2d(2), lambda y: y, 1),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    module, read, sites = MODULES[name]
    ChangeTrueDivToMulByInverse()(torch.fx.symbolic_trace(Behind(module, 7, read)), expect=sites)
    ChangeTrueDivToMulByInverse()(torch.fx.symbolic_trace(Behind(module, 8, read)), expect=1)


CONTINUOUS: dict[str, Callable[[Tensor, float], Any]] = {
    "greatest of all": lambda x, c: torch.max(x / c),
    "greater of two": lambda x, c: torch.max(x / c, torch.relu(x)),
    "maximum": lambda x, c: torch.maximum(x / c, x),
    "median of all": lambda x, c: torch.median(x / c),
    "quantile": lambda x, c: torch.quantile(x / c, 0.3, interpolation="nearest"),
    "linear share": lambda x, c: torch.quantile(x, x[0] / c),
    "grid, bilinear": lambda x, c: F.grid_sample(x[None, None], (x / c).view(1, 2, 4, 2), align_corners=False),
    "image": lambda x, c: F.grid_sample((x / c)[None, None], x.view(1, 2, 4, 2), "nearest", align_corners=False),
    "magnitude": lambda x, c: torch.copysign(x / c, x),
    "selected from": lambda x, c: (x / c)[torch.tensor([0, 1])],
    "filled": lambda x, c: (x / c).masked_fill(x > 0.5, 0),
    "chosen": lambda x, c: torch.where(x > 0.5, x / c, x),
    "softshrink": lambda x, c: F.softshrink(x / c, 0.1),
    "relu": lambda x, c: F.relu(x / c),
    "rrelu": lambda x, c: F.rrelu(x / c),
    "nan_to_num": lambda x, c: torch.nan_to_num(x / c),
    "interpolate": lambda x, c: F.interpolate((x / c)[None, None], scale_factor=2.0),
    "pool": lambda x, c: F.max_pool2d((x / c)[None], 2),
    "adaptive pool": lambda x, c: F.adaptive_max_pool2d((x / c)[None], 2)[0],
    "norm": lambda x, c: torch.linalg.vector_norm(x / c),
    "prediction": lambda x, c: F.hinge_embedding_loss(x / c, x.sign()),
    "sum in double": lambda x, c: torch.sum(x / c, dtype=torch.float64),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_quotients_before_what_is_continuous_change(name: str) -> None:
    graph_module = graph_of(Apply(CONTINUOUS[name], 7), "modules", square())
    x = square()
    torch.manual_seed(0)
    expected = graph_module(x)
    ChangeTrueDivToMulByInverse()(graph_module, strict=True)
    assert len(history(graph_module)[-1].rewrites) == 1
    torch.manual_seed(0)
    torch.testing.assert_close(graph_module(x), expected)
