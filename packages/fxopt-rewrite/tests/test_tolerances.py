from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from fxopt_rewrite import (
    Tolerance,
    tolerance,
)
from fxopt_rewrite.tolerances import EXACT

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def close(actual: torch.Tensor, expected: torch.Tensor, within: Tolerance | None = None) -> bool:
    """Return whether two tensors have the same shape and dtype, and values that agree within a tolerance."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    within = tolerance(expected.dtype) if within is None else within
    if within.is_exact and not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(actual, expected)
    wide = torch.complex128 if expected.is_complex() else torch.float64
    return torch.allclose(actual.to(wide), expected.to(wide), rtol=within.rtol, atol=within.atol, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    [
        (torch.float64, 1e-9, 1e-11),
        (torch.float32, 1e-4, 1e-5),
        (torch.bfloat16, 5e-2, 2e-2),
        (torch.float16, 1e-2, 5e-3),
        (torch.complex128, 1e-9, 1e-11),
        (torch.complex64, 1e-4, 1e-5),
        (torch.complex32, 1e-2, 5e-3),
    ],
)
def test_stated(dtype: torch.dtype, rtol: float, atol: float) -> None:
    assert tolerance(dtype) == Tolerance(rtol, atol)
    assert not tolerance(dtype).is_exact


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64])
def test_integers_are_exact(dtype: torch.dtype) -> None:
    assert tolerance(dtype) == EXACT
    assert not close(torch.tensor([0, 1]).to(dtype), torch.tensor([1, 1]).to(dtype))
    assert close(torch.tensor([0, 1]).to(dtype), torch.tensor([0, 1]).to(dtype))


def test_large_integers_are_not_compared_as_floats() -> None:
    assert not close(torch.tensor([2**53]), torch.tensor([2**53 + 1]))


def test_eight_bits() -> None:
    assert tolerance(torch.float8_e4m3fn) == Tolerance(0.25, 0.125)
    assert tolerance(torch.float8_e5m2) == Tolerance(0.5, 0.25)


def test_order_of_precision() -> None:
    stated = [tolerance(dtype) for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)]
    assert stated == sorted(stated, key=lambda found: found.rtol)
    for dtype in FLOATS:
        assert tolerance(dtype).rtol > 4 * torch.finfo(dtype).eps


@given(st.sampled_from(FLOATS), st.floats(-100, 100), st.sampled_from([-1, 1]))
def test_boundary(dtype: torch.dtype, value: float, sign: int) -> None:
    within = tolerance(dtype)
    expected = torch.tensor([value], dtype=torch.float64)
    reach = within.atol + within.rtol * abs(value)
    assert close(expected + sign * 0.99 * reach, expected, within)
    assert not close(expected + sign * 1.01 * reach, expected, within)


def test_shape_and_dtype_count() -> None:
    assert not close(torch.zeros(2), torch.zeros(2, 1))
    assert not close(torch.zeros(2), torch.zeros(2, dtype=torch.float64))


def test_special_values() -> None:
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    assert close(values, values.clone())
    assert close(values, values.clone(), EXACT)
    assert not close(values, -values)
    assert not close(torch.tensor([float("inf")]), torch.tensor([1e30]))


def test_complex_and_empty() -> None:
    assert close(torch.tensor([1 + 1j]), torch.tensor([1 + 1.00001j]))
    assert not close(torch.tensor([1 + 1j]), torch.tensor([1 + 1.1j]))
    assert close(torch.zeros(0, 3), torch.zeros(0, 3))


@pytest.mark.parametrize("dtype", FLOATS)
def test_another_order_of_summation_stays_within(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(8, 4096).to(dtype), torch.randn(4, 4096).to(dtype) / 64
    order = torch.randperm(4096)
    assert close(x[:, order] @ weight[:, order].T, x @ weight.T)
