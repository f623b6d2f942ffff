"""The arithmetic of folding, against torch's own batch norm in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fxopt_norm.formulas import fold_after


def statistics(channels: int, *, affine: bool, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return mean, variance, weight and bias."""
    random = torch.Generator().manual_seed(seed)
    mean, weight, bias = (torch.randn(channels, generator=random, dtype=torch.float64) for _ in range(3))
    var = torch.rand(channels, generator=random, dtype=torch.float64) + 0.1
    return (mean, var, weight, bias) if affine else (mean, var, None, None)


@given(
    groups=st.integers(1, 3),
    inner=st.integers(1, 3),
    outer=st.integers(1, 3),
    dims=st.integers(1, 3),
    transposed=st.booleans(),
    biased=st.booleans(),
    affine=st.booleans(),
    eps=st.sampled_from([0.0, 1e-12, 1e-5, 1e-3, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_fold_after_any_convolution(
    groups: int, inner: int, outer: int, dims: int, transposed: bool, biased: bool, affine: bool, eps: float
) -> None:
    kernel = (2,) * dims
    shape = (groups * inner, outer) if transposed else (groups * outer, inner)
    weight = torch.randn(*shape, *kernel, dtype=torch.float64)
    bias = torch.randn(groups * outer, dtype=torch.float64) if biased else None
    mean, var, norm_weight, norm_bias = statistics(groups * outer, affine=affine)
    name = f"conv{'_transpose' if transposed else ''}{dims}d"
    convolve = getattr(F, name)
    x = torch.randn(2, groups * inner, *(4,) * dims, dtype=torch.float64)
    expected = F.batch_norm(
        convolve(x, weight, bias, groups=groups), mean, var, norm_weight, norm_bias, training=False, eps=eps
    )
    new = fold_after(weight, bias, mean, var, norm_weight, norm_bias, eps=eps, transposed=transposed, groups=groups)
    torch.testing.assert_close(convolve(x, *new, groups=groups), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_is_computed_wide_and_rounded_once(dtype: torch.dtype) -> None:
    weight, bias = torch.randn(6, 4, 3, 3).to(dtype), torch.randn(6).to(dtype)
    mean, var, norm_weight, norm_bias = (None if t is None else t.to(dtype) for t in statistics(6, affine=True))
    assert mean is not None
    assert var is not None
    wide = [None if t is None else t.double() for t in (norm_weight, norm_bias)]
    exact = fold_after(weight.double(), bias.double(), mean.double(), var.double(), *wide, eps=1e-5)
    new = fold_after(weight, bias, mean, var, norm_weight, norm_bias, eps=1e-5)
    for one, other in zip(new, exact, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other.to(dtype))
