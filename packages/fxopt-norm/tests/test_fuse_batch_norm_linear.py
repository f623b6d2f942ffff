"""FuseBatchNorm1dInLinear: behind and before a linear layer, on 2-D values alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from norm_models import Computes, chain
from torch import Tensor, nn

from fxopt_norm import FuseBatchNorm1dInLinear
from fxopt_testing import assert_rewrites
from fxopt_testing.rewrites import refused

OTHERS = [(torch.randn(7, 4),), (torch.randn(0, 4),), (torch.randn(1, 4),), (torch.randn(4, 3).t(),)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("first", ["linear", "norm"])
def test_batch_norm_behind_and_before_a_linear_layer(first: str, bias: bool, affine: bool) -> None:
    linear, norm = nn.Linear(4, 6, bias=bias), nn.BatchNorm1d(6 if first == "linear" else 4, affine=affine)
    model, place = (chain(linear, norm), 0) if first == "linear" else (chain(norm, linear), 1)
    folded = assert_rewrites(FuseBatchNorm1dInLinear(), model, torch.randn(3, 4), count=1, others=OTHERS)
    assert list(folded.state_dict()) == [f"{place}_folded.weight", f"{place}_folded.bias"]


@pytest.mark.parametrize("first", ["linear", "norm"])
def test_three_dimensional_values_are_refused(first: str) -> None:
    linear, norm = nn.Linear(5, 5), nn.BatchNorm1d(5)  # channels and features agree, which hides the mistake
    model = chain(linear, norm) if first == "linear" else chain(norm, linear)
    folded = assert_rewrites(FuseBatchNorm1dInLinear(), model, torch.randn(2, 5, 5), count=0)
    assert [reason for _, reason in refused(folded)] == ["wrong-axis"]


def test_functional_forms_at_the_root() -> None:
    root = Computes(lambda m, x: F.batch_norm(F.linear(x, m.w, m.b), m.mean, m.var, eps=1e-3))
    root.w, root.b = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6))
    root.register_buffer("mean", torch.randn(6))
    root.register_buffer("var", torch.rand(6) + 0.5)
    folded = assert_rewrites(FuseBatchNorm1dInLinear(), root, torch.randn(3, 4), count=1)
    assert list(folded.state_dict()) == ["w_folded.weight", "w_folded.bias"]


def test_what_is_used_elsewhere_is_left_alone() -> None:
    def after(m: Any, x: Tensor) -> Any:
        y = m.linear(x)
        return m.bn(y) + y

    def before(m: Any, x: Tensor) -> Any:
        y = m.bn(x)
        return m.linear(y) + y

    for forward in (after, before):
        model = Computes(forward, linear=nn.Linear(4, 4), bn=nn.BatchNorm1d(4))
        folded = assert_rewrites(FuseBatchNorm1dInLinear(), model, torch.randn(3, 4), count=0)
        assert [reason for _, reason in refused(folded)] == ["several-users"]
