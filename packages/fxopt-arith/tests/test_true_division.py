"""ChangeTrueDivToMulByInverse: which divisions become products, which stay, and what undoing gives back."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from site_passes import Called, Computes
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_arith import ChangeTrueDivToMulByInverse
from fxopt_core import iter_nodes
from fxopt_testing import assert_rewrites
from fxopt_testing.forms import TRACED, Form
from fxopt_testing.rewrites import graph_of, refused

# By day, dynamic sizes stand for fixed ones.
FORMS = [*TRACED, "export-dynamic", pytest.param("export", marks=pytest.mark.nightly)]


def traced(function: Callable[..., Any]) -> GraphModule:
    return torch.fx.symbolic_trace(Called(function))


def divided_by(constant: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x / constant


OUT_OF_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "operator": lambda x: x / 7,
    "method": lambda x: x.div(other=7),
    "float": lambda x: x / 0.3,
    "negative": lambda x: x / -7,
    "parts": lambda x: (x / 7).view(-1).relu().sum() / 3,
}
SITES = {"parts": 2}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OUT_OF_PLACE)
def test_every_form_of_division(form: Form, name: str) -> None:
    others = [(torch.tensor([[0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-42]]),), (torch.randn(0, 6),)]
    sites = SITES.get(name, 1)
    assert_rewrites(
        ChangeTrueDivToMulByInverse(),
        Called(OUT_OF_PLACE[name]),
        torch.randn(3, 6),
        count=sites,
        form=form,
        others=others,
    )


def test_in_place_operator() -> None:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(operator.itruediv, (graph.placeholder("x"), 4)))
    graph_module, x = GraphModule(nn.Module(), graph), torch.ones(3)
    ChangeTrueDivToMulByInverse()(graph_module, expect=1)
    assert graph_module(x) is x
    assert torch.equal(x, torch.full((3,), 0.25))


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "div_": lambda x: x.div_(8),
    "true_divide_": lambda x: x.true_divide_(8),
    "on a view": lambda x: (x.view(-1).div_(8), x + 1)[1],
    "result unused": lambda x: (x.div_(8), x * 2)[1],
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_forms_write_the_callers_tensor_as_before(name: str) -> None:
    model = Called(IN_PLACE[name])
    rewritten = assert_rewrites(ChangeTrueDivToMulByInverse(), model, torch.randn(3, 6), count=1, gradients=False)
    x, y = torch.ones(3, 6), torch.ones(3, 6)
    rewritten(x)
    model(y)
    torch.testing.assert_close(x, y)
    assert not torch.equal(x, torch.ones(3, 6))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_dtypes_of_the_dividend(dtype: torch.dtype) -> None:
    x = torch.arange(12).view(3, 4).to(dtype)
    assert_rewrites(ChangeTrueDivToMulByInverse(), Called(lambda x: x / 7), x, count=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32])
@pytest.mark.parametrize("constant", [8, -2, 0.25])
def test_powers_of_two_are_exact(dtype: torch.dtype, constant: float) -> None:
    x = (torch.randn(5, 4) * 100).to(dtype)
    model = Called(lambda x: x / constant)
    assert_rewrites(ChangeTrueDivToMulByInverse(), model, x, count=1, exact=True)


@given(constant=st.floats(allow_nan=True, allow_infinity=True) | st.integers(-(2**63), 2**63 - 1), known=st.booleans())
@settings(max_examples=settings().max_examples // 3, deadline=None)
def test_any_constant_is_safe(constant: float, known: bool) -> None:
    graph_module = (
        graph_of(Called(lambda x: x / constant), "modules", torch.ones(3)) if known else traced(lambda x: x / constant)
    )
    x = torch.tensor([1.0, -3.0, 0.0, 1e-3, 1e3])
    expected = graph_module(x)
    ChangeTrueDivToMulByInverse()(graph_module)
    torch.testing.assert_close(graph_module(x), expected, equal_nan=True)
    if refused(graph_module):
        assert refused(graph_module)[0][1] in {"unsafe-constant", "shape-unknown"}
    ChangeTrueDivToMulByInverse()(graph_module, reverse=True)
    division = next(node for node in iter_nodes(graph_module.graph) if node.op == "call_function")
    assert type(division.args[1]) is type(constant)
    assert repr(division.args[1]) == repr(constant)


@pytest.mark.parametrize("constant", [0, 0.0, -0.0, 1e-40, 1e-320, float("inf"), float("nan"), 1e39, 10**400])
def test_constants_without_a_safe_inverse_stay(constant: float) -> None:
    graph_module = traced(lambda x: x / constant)
    ChangeTrueDivToMulByInverse()(graph_module, expect=0)
    assert [reason for _, reason in refused(graph_module)] == ["unsafe-constant"]


@pytest.mark.parametrize(
    ("dtype", "constant", "sites"),
    [
        (torch.float16, 16384, 1),
        (torch.float16, 2.0**15, 0),
        (torch.float16, 1e5, 0),
        (torch.float16, 1e-4, 1),
        (torch.float16, 1e-5, 0),
        (torch.bfloat16, 1e5, 1),
        (torch.float32, 1e38, 0),
        (torch.float32, 1e37, 1),
        (torch.float64, 1e300, 1),
        (torch.float64, 1e-300, 1),
        (torch.float64, 1e308, 0),
        (torch.int64, 1e300, 0),
    ],
)
def test_the_limits_are_those_of_the_computation(dtype: torch.dtype, constant: float, sites: int) -> None:
    rewritten = assert_rewrites(
        ChangeTrueDivToMulByInverse(), Called(lambda x: x / constant), torch.ones(3, dtype=dtype), count=sites
    )
    assert [reason for _, reason in refused(rewritten)] == ["unsafe-constant"] * (1 - sites)


def test_where_the_dtype_matters_and_is_not_known_the_site_is_refused() -> None:
    for constant, reason in {1e5: "shape-unknown", 1e-5: "shape-unknown", 1e300: "unsafe-constant"}.items():
        graph_module = traced(divided_by(constant))
        ChangeTrueDivToMulByInverse()(graph_module, expect=0)
        assert [found for _, found in refused(graph_module)] == [reason]


def test_half_precision_in_the_default_dtype() -> None:
    try:
        torch.set_default_dtype(torch.float64)
        assert_rewrites(
            ChangeTrueDivToMulByInverse(), Called(lambda x: x / 1e300), torch.ones(3, dtype=torch.int64), count=1
        )
    finally:
        torch.set_default_dtype(torch.float32)


SHAPE_ARITHMETIC: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda x: x * (x.shape[-1] / 3),
    "size": lambda x: x * (x.size(-1) / 3),
    "size()": lambda x: x * (x.size()[0] / 3),
    "dim": lambda x: x * (x.dim() / 7),
    "numel": lambda x: x * (x.numel() / 7),
    "root": lambda x: x * (x.shape[-1] ** 0.5 / 7),
    "stride": lambda x: x * (x.stride(0) / 7),
    "twice": lambda x: x * (x.shape[-1] / 7 / 3),
    "tolist": lambda x: x * (x.tolist()[0] / 7),
    "numel of a shape": lambda x: x * (x.shape.numel() / 7),
}


@pytest.mark.parametrize("name", SHAPE_ARITHMETIC)
def test_shape_arithmetic_stays(name: str) -> None:
    graph_module = traced(SHAPE_ARITHMETIC[name])
    ChangeTrueDivToMulByInverse()(graph_module, expect=0)
    assert {reason for _, reason in refused(graph_module)} == {"shape-arithmetic"}


def test_numbers_among_the_inputs_stay() -> None:
    def function(x: Tensor, n: int, sizes: tuple[int, int], scale: float | None) -> Any:
        return n / 13, sizes[1] / 13, scale / 13 if scale is not None else 0, x / 13

    graph_module = torch.fx.symbolic_trace(function)
    ChangeTrueDivToMulByInverse()(graph_module, expect=1)
    assert [reason for _, reason in refused(graph_module)] == ["shape-arithmetic"] * 3


def test_symbolic_sizes_stay_in_an_export() -> None:
    def function(x: Tensor) -> Tensor:
        return x * (x.shape[0] / 7) + x / 7

    assert_rewrites(ChangeTrueDivToMulByInverse(), Called(function), torch.randn(4, 6), count=1, form="export-dynamic")


def test_a_tensor_made_of_sizes_is_a_tensor() -> None:
    graph_module = traced(lambda x: torch.relu(x) / 7 + x.new_full((2,), 3.0) / 7)
    ChangeTrueDivToMulByInverse()(graph_module, expect=2)


ROUNDED: dict[str, Callable[[Tensor, float], Any]] = {
    "floor": lambda x, c: torch.floor(x / c),
    "in place": lambda x, c: (x / c).floor_(),
    "by a method": lambda x, c: (x / c).round(),
    "special": lambda x, c: torch.special.round(x / c),
    "floordiv": lambda x, c: x / c // 1,
    "mod": lambda x, c: x / c % 1,
    "fmod": lambda x, c: torch.fmod(x / c, 0.1),
    "rounded quotient": lambda x, c: torch.div(x / c, 2, rounding_mode="floor"),
    "compared": lambda x, c: x / c > 0.5,
    "close": lambda x, c: torch.isclose(x / c, x),
    "condition": lambda x, c: torch.where(x / c > 0.1, x, 0),
    "cast": lambda x, c: (x / c).to(torch.long),
    "cast by keyword": lambda x, c: (x / c).to(dtype=torch.int32),
    "cast by name": lambda x, c: (x / c).type("torch.LongTensor"),
    "long": lambda x, c: (x / c).long(),
    "sum of integers": lambda x, c: torch.sum(x / c, dtype=torch.int64),
    "argmax": lambda x, c: (x / c).argmax(),
    "logical_and": lambda x, c: torch.logical_and(x / c, x),
    "all": lambda x, c: torch.all(x / c),
    "threshold": lambda x, c: F.threshold(x / c, 0.5, 0),
    "hardshrink": lambda x, c: F.hardshrink(x / c, 0.5),
    "isin": lambda x, c: torch.isin(x / c, x),
    "bucketize": lambda x, c: torch.bucketize(x / c, torch.arange(3.0)),
    "histc": lambda x, c: torch.histc(x / c, 4, 0, 1),
    "histogram": lambda x, c: torch.histogram(x / c, bins=4),
    "logical_xor": lambda x, c: torch.logical_xor(x / c, x),
    "behind views": lambda x, c: (x / c).unsqueeze(0)[1:].view(-1)[None].detach().long(),
    "behind copies": lambda x, c: (x / c).clone().contiguous().float().long(),
    "behind a choice": lambda x, c: torch.cat([x, x / c]).clamp(0, 255).to(torch.uint8),
    "divided through a view": lambda x, c: _divided_through_a_view(x.clone(), c),
    "stored": lambda x, c: _stored(torch.zeros_like(x), x / c) * 2,
    "chosen into another tensor": lambda x, c: torch.cat([x / c], out=torch.zeros_like(x)) * 2,
    "divided in place": lambda x, c: (x * 2).div_(c) * 2,
    "copied into integers": lambda x, c: x.long().copy_(x / c),
    "bernoulli": lambda x, c: torch.bernoulli(x / c),
}


def _divided_through_a_view(y: Tensor, constant: float) -> Tensor:
    y[:].div_(constant)
    return y.floor()


def _stored(out: Tensor, value: Tensor) -> Tensor:
    out[:].copy_(value)
    return out


@pytest.mark.parametrize("name", ROUNDED)
def test_quotients_that_a_reader_rounds_stay_unless_they_are_exact(name: str) -> None:
    graph_module = traced(lambda x: ROUNDED[name](x, 7))
    ChangeTrueDivToMulByInverse()(graph_module, expect=0)
    assert {reason for _, reason in refused(graph_module)} - {"rounding-mode"} == {"rounded-quotient"}
    ChangeTrueDivToMulByInverse()(traced(lambda x: ROUNDED[name](x, 8)), expect=1)


NOT_ROUNDED: dict[str, Callable[[Tensor], Any]] = {
    "ceil later": lambda x: ((x / 7).view(-1) * 2 + 1).relu().ceil(),
    "softmax": lambda x: torch.softmax(x / 7, -1).argmax(-1),
    "another value": lambda x: x / 7 + x.floor(),
    "rounded before": lambda x: x.floor() / 7,
    "shape only": lambda x: torch.zeros_like(x / 3).floor(),
    "selected from": lambda x: (x / 7)[torch.tensor([0, 1])],
    "cast to floating point": lambda x: (x / 7).to(torch.float64),
    "cast by method": lambda x: (x / 7).double().contiguous(),
    "sum in double": lambda x: torch.sum(x / 7, dtype=torch.float64),
    "clamped": lambda x: (x / 7).clamp(0, 1).where(x > 0, x),
    "chosen": lambda x: torch.where(x > 0.5, x / 7, x),
    "greatest of all": lambda x: torch.max(x / 7),
    "greater of two": lambda x: torch.max(x / 7, torch.relu(x)),
    "quantile": lambda x: torch.quantile(x / 7, 0.3, interpolation="nearest"),
    "grid": lambda x: F.grid_sample(x[None, None], (x / 7).view(1, 2, 4, 2), align_corners=False),
    "softshrink": lambda x: F.softshrink(x / 7, 0.1),
    "interpolate": lambda x: F.interpolate((x / 7)[None, None], scale_factor=2.0),
    "pool": lambda x: F.max_pool2d((x / 7)[None], 2),
    "adaptive pool": lambda x: F.adaptive_max_pool2d((x / 7)[None], 2)[0],
    "norm": lambda x: torch.linalg.vector_norm(x / 7),
    "masked": lambda x: (x / 7).masked_fill_(x > 0.5, -1.0).softmax(-1),
}


@pytest.mark.parametrize("name", NOT_ROUNDED)
def test_quotients_that_nothing_rounds_change(name: str) -> None:
    x = torch.rand(4, 4)
    graph_module = graph_of(Called(NOT_ROUNDED[name]), "modules", x)
    expected = graph_module(x)
    ChangeTrueDivToMulByInverse()(graph_module, strict=True, expect=1)
    torch.testing.assert_close(graph_module(x), expected)


MODULES: dict[str, tuple[nn.Module, int]] = {
    "ReLU": (nn.ReLU(), 1),
    "Linear": (nn.Linear(4, 4), 1),
    "Softshrink": (nn.Softshrink(), 1),
    "MaxPool2d": (nn.MaxPool2d(2, return_indices=True), 1),
    "Threshold": (nn.Threshold(0.5, 0), 0),
    "Hardshrink": (nn.Hardshrink(), 0),
    "opaque": (Called(lambda x: x.floor()), 0),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_after_a_quotient(name: str) -> None:
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return True

    module, sites = MODULES[name]
    model = Computes(lambda m, x: m.module(x / 7), module=module)
    graph_module = GraphModule(model, Tracer().trace(model))
    ChangeTrueDivToMulByInverse()(graph_module, expect=sites)


OTHER_DIVISIONS: dict[str, tuple[Callable[[Tensor], Any], list[str]]] = {
    "rounding mode": (lambda x: torch.div(x, 7, rounding_mode="floor"), ["rounding-mode"]),
    "rounding method": (lambda x: x.div(7, rounding_mode="trunc"), ["rounding-mode"]),
    "rounding in place": (lambda x: (x * 1).div_(8, rounding_mode="floor"), ["rounding-mode"]),
    "into another tensor": (lambda x: torch.div(x, 7, out=x), ["unsupported-call"]),
    "by a tensor": (lambda x: x / x, []),
    "by a tensor, rounded": (lambda x: torch.div(x, x, rounding_mode="floor"), []),
    "reversed": (lambda x: 7 / x, []),
    "by True": (lambda x: x / True, []),
    "floor division": (lambda x: x // 7, []),
}


@pytest.mark.parametrize("name", OTHER_DIVISIONS)
def test_other_divisions_stay(name: str) -> None:
    function, reasons = OTHER_DIVISIONS[name]
    graph_module = graph_of(Called(function), "modules", torch.ones(3, 4))
    before = graph_module.code
    ChangeTrueDivToMulByInverse()(graph_module, expect=0)
    assert graph_module.code == before
    assert [reason for _, reason in refused(graph_module)] == reasons
