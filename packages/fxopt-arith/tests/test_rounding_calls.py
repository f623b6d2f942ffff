"""Which calls make the last bit of a quotient matter: what jumps, what gives indices, and what is continuous."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

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
    "max": lambda x, c: torch.max(x / c, 1),
    "max by keyword": lambda x, c: torch.max(x / c, dim=1)[1],
    "max method": lambda x, c: (x / c).max(1).indices,
    "min": lambda x, c: torch.min(x / c, -1, keepdim=True)[1],
    "min method": lambda x, c: (x / c).min(dim=0)[1],
    "all of max": lambda x, c: (x / c).max(1)[-1],
    "cummax": lambda x, c: torch.cummax(x / c, 0)[1],
    "cummin method": lambda x, c: (x / c).cummin(0).indices,
    "median": lambda x, c: torch.median(x / c, 1)[1],
    "nanmedian": lambda x, c: (x / c).nanmedian(dim=1).indices,
    "kthvalue": lambda x, c: (x / c).kthvalue(2)[1],
    "mode": lambda x, c: torch.mode(x / c)[0],
    "sort": lambda x, c: torch.sort(x / c),
    "frexp": lambda x, c: torch.frexp(x / c)[0],
    "share of a quantile": lambda x, c: torch.quantile(x, x[0] / c, interpolation="nearest"),
    "share by keyword": lambda x, c: x.nanquantile(q=x[0] / c, interpolation="lower"),
    "grid": lambda x, c: F.grid_sample(x[None, None], (x / c).view(1, 2, 4, 2), "nearest", align_corners=False),
    "grid by keyword": lambda x, c: F.grid_sample(
        input=x[None, None], grid=(x / c).view(1, 2, 4, 2), mode="nearest", align_corners=False
    ),
    "grid_sampler": lambda x, c: torch.grid_sampler(x[None, None], (x / c).view(1, 2, 4, 2), 1, 0, False),
    "copysign": lambda x, c: torch.copysign(x, x / c - 0.1),
    "signbit": lambda x, c: torch.signbit(x / c - 0.1),
    "sign": lambda x, c: (x / c - 0.1).sign(),
    "heaviside": lambda x, c: torch.heaviside(x / c - 0.1, x),
    "angle": lambda x, c: torch.angle(x / c - 0.1),
    "atan2": lambda x, c: torch.atan2(x / c - 0.1, x),
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
    "index": lambda x, c: x[(x / c).long().clamp(0, 3)],
    "one_hot": lambda x, c: F.one_hot((x / c).long().abs(), 9),
    "sum of integers": lambda x, c: torch.sum(x / c, dtype=torch.int64),
    "bits": lambda x, c: (x / c).view(torch.int32),
    "norm that counts": lambda x, c: torch.linalg.vector_norm(x / c - 0.1, 0),
    "distance that counts": lambda x, c: torch.cdist(x / c, x, p=0.0),
    "target": lambda x, c: F.hinge_embedding_loss(x, x / c),
    "rank": lambda x, c: torch.linalg.matrix_rank(x / c),
    "filled integers": lambda x, c: torch.zeros(3, dtype=torch.long).fill_((x / c).sum()),
}


@pytest.mark.parametrize("name", JUMPING)
def test_quotients_before_a_jump_stay(name: str) -> None:
    graph_module = torch.fx.symbolic_trace(Apply(JUMPING[name], 7))
    ChangeTrueDivToMulByInverse()(graph_module, expect=0)
    assert {reason for _, reason in refused(graph_module)} == {"rounded-quotient"}
    exact = torch.fx.symbolic_trace(Apply(JUMPING[name], 8))
    ChangeTrueDivToMulByInverse()(exact, expect=1)


def test_a_hard_gumbel_softmax_chooses() -> None:
    for hard, sites in {True: 0, False: 1}.items():
        model = Apply(lambda x, c, hard=hard: F.gumbel_softmax(x / c, hard=hard), 7)  # type: ignore[misc]  # bound now
        ChangeTrueDivToMulByInverse()(torch.fx.symbolic_trace(model), expect=sites)


POOLS: dict[str, Callable[[Tensor], Any]] = {
    "max_pool1d": lambda x: F.max_pool1d(x, 2, return_indices=True),
    "max_pool2d": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "max_pool2d by position": lambda x: F.max_pool2d(x, 2, 2, 0, 1, False, True),
    "max_pool2d_with_indices": lambda x: F.max_pool2d_with_indices(x, [2, 2]),
    "max_pool3d": lambda x: F.max_pool3d(x[None], 2, return_indices=True),
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x, 2, return_indices=True),
    "torch.adaptive_max_pool1d": lambda x: torch.adaptive_max_pool1d(x, 2),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True),
    "adaptive_max_pool3d": lambda x: F.adaptive_max_pool3d(x[None], 2, return_indices=True),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x, 2, 2, return_indices=True),
    "max": lambda x: torch.max(x, 1),
    "min": lambda x: x.min(dim=1),
    "cummax": lambda x: torch.cummax(x, 1),
    "cummin": lambda x: x.cummin(1),
    "sort": torch.sort,
    "topk": lambda x: torch.topk(x, 2),
    "kthvalue": lambda x: torch.kthvalue(x, 2),
    "median": lambda x: torch.median(x, 1),
}
"""What gives values and indices."""


@pytest.mark.parametrize("name", POOLS)
def test_indices_tell_the_order_and_values_do_not(name: str) -> None:
    both: dict[str, tuple[Callable[[Any], Any], float, int]] = {
        "both": (lambda result: (result[0], result[1]), 7, 0),
        "indices": (lambda result: result[1], 7, 0),
        "values": (lambda result: result[0], 7, 1),
        "values, rounded": (lambda result: result[0].floor(), 7, 0),
        "exact": (lambda result: result[1], 8, 1),
    }
    for read, constant, sites in both.values():
        model = Apply(lambda x, c, read=read: read(POOLS[name](x / c)), constant)  # type: ignore[misc]  # bound now
        ChangeTrueDivToMulByInverse()(torch.fx.symbolic_trace(model), expect=sites)


OVERLOADS: dict[Any, tuple[Any, ...]] = {
    aten.max.dim: (1,),
    aten.min.dim: (1,),
    aten.cummax.default: (0,),
    aten.cummin.default: (0,),
    aten.topk.default: (2,),
    aten.median.dim: (0,),
    aten.max_pool2d_with_indices.default: ([2, 2],),
    aten.max_pool3d_with_indices.default: ([2, 2, 2],),
    aten.adaptive_max_pool2d.default: ([2, 2],),
    aten.adaptive_max_pool3d.default: ([2, 2, 2],),
    aten.fractional_max_pool2d.default: ([2, 2], [2, 2], None),
}
JUMPING_OVERLOADS: dict[Any, tuple[Any, ...]] = {
    aten.threshold.default: (0.5, 0),
    aten.threshold_.default: (0.5, 0),
    aten.hardshrink.default: (),
    aten.frexp.Tensor: (),
    aten.any.default: (),
    aten.signbit.default: (),
    aten._local_scalar_dense.default: (),
    aten._unique2.default: (),
    aten.threshold_backward.default: (1.0, 0),
    torch.fake_quantize_per_tensor_affine: (0.1, 0, 0, 255),
    aten.quantize_per_tensor.default: (0.1, 0, torch.quint8),
}


def called(target: Any, *args: Any, constant: float = 7, read: int | None = None) -> GraphModule:
    graph = torch.fx.Graph()
    value = graph.call_function(torch.div, (graph.placeholder("x"), constant))
    result = graph.call_function(target, (value, *args))
    graph.output(result if read is None else graph.call_function(operator.getitem, (result, read)))
    return GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("target", OVERLOADS, ids=str)
def test_overloads_with_indices(target: Any) -> None:
    for read, constant, sites in [(None, 7, 0), (1, 7, 0), (0, 7, 1), (1, 8, 1)]:
        graph_module = called(target, *OVERLOADS[target], constant=constant, read=read)
        ChangeTrueDivToMulByInverse()(graph_module, expect=sites)


@pytest.mark.parametrize("target", JUMPING_OVERLOADS, ids=lambda target: getattr(target, "__name__", target))
def test_overloads_that_jump(target: Any) -> None:
    for constant, sites in {7: 0, 8: 1}.items():
        graph_module = called(target, *JUMPING_OVERLOADS[target], constant=constant)
        ChangeTrueDivToMulByInverse()(graph_module, expect=sites)


MODULES: dict[str, tuple[nn.Module, Callable[[Any], Any], int]] = {
    "Threshold": (nn.Threshold(0.5, 0), lambda y: y, 0),
    "Hardshrink": (nn.Hardshrink(), lambda y: y, 0),
    "Softshrink": (nn.Softshrink(), lambda y: y, 1),
    "RReLU": (nn.RReLU(), lambda y: y, 1),
    "MaxPool1d": (nn.MaxPool1d(2), lambda y: y, 1),
    "MaxPool1d, both": (nn.MaxPool1d(2, return_indices=True), lambda y: y, 0),
    "MaxPool2d, indices": (nn.MaxPool2d(2, return_indices=True), lambda y: y[1], 0),
    "MaxPool2d, values": (nn.MaxPool2d(2, return_indices=True), lambda y: y[0], 1),
    "AdaptiveMaxPool2d, indices": (nn.AdaptiveMaxPool2d(2, return_indices=True), lambda y: y[1], 0),
    "AdaptiveMaxPool2d": (nn.AdaptiveMaxPool2d(2), lambda y: y, 1),
    "FractionalMaxPool2d, indices": (nn.FractionalMaxPool2d(2, 2, return_indices=True), lambda y: y[1], 0),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    module, read, sites = MODULES[name]
    ChangeTrueDivToMulByInverse()(torch.fx.symbolic_trace(Behind(module, 7, read)), expect=sites)
    ChangeTrueDivToMulByInverse()(torch.fx.symbolic_trace(Behind(module, 8, read)), expect=1)


class WholeSequentials(torch.fx.Tracer):
    """Traces no module of torch, not even a ``Sequential``."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def test_modules_within_a_sequential() -> None:
    parts: list[tuple[nn.Module, int]] = [
        (nn.Threshold(0.5, 0), 0),
        (nn.Sequential(nn.Hardshrink()), 0),
        (nn.MaxPool2d(2, return_indices=True), 0),
        (nn.Tanh(), 1),
    ]
    for part, sites in parts:
        model = Behind(nn.Sequential(nn.ReLU(), part), 7, lambda y: y)
        graph_module = GraphModule(model, WholeSequentials().trace(model))
        ChangeTrueDivToMulByInverse()(graph_module, expect=sites)


def test_a_distance_that_counts() -> None:
    class Distance(nn.Module):
        def __init__(self, order: float) -> None:
            super().__init__()
            self.distance = nn.PairwiseDistance(order)

        def forward(self, x: Tensor) -> Any:
            return self.distance(x / 7, x)

    for order, sites in {0.0: 0, 2.0: 1}.items():
        ChangeTrueDivToMulByInverse()(torch.fx.symbolic_trace(Distance(order)), expect=sites)


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
