from __future__ import annotations

import pytest
import torch

from fxopt_rewrite import (
    Tolerance,
    tolerance,
)

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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
        (torch.float8_e4m3fn, 0.25, 0.125),
        (torch.float8_e5m2, 0.5, 0.25),
    ],
)
def test_stated(dtype: torch.dtype, rtol: float, atol: float) -> None:
    assert tolerance(dtype) == Tolerance(rtol, atol)


@pytest.mark.parametrize("dtype", FLOATS)
def test_another_order_of_summation_stays_within(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(8, 4096).to(dtype), torch.randn(4, 4096).to(dtype) / 64
    order = torch.randperm(4096)
    within = tolerance(dtype)
    torch.testing.assert_close(x[:, order] @ weight[:, order].T, x @ weight.T, rtol=within.rtol, atol=within.atol)
