"""Inputs of other dtypes than at capture: taken where the graph does not depend on them, refused where it does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from archive_models import in_every_form
from site_passes import Computes
from test_capture_errors import line_of
from torch import Tensor, nn

from fxopt_capture import InputGuards, capture
from fxopt_core.errors import CaptureError


class Limits(nn.Module):
    """Has a constant that follows from the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, torch.finfo(x.dtype).min, x)


class Ones(nn.Module):
    """Adds a tensor in the dtype of its input, which decides on the dtype of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.linear(x), torch.ones(4, dtype=x.dtype))


class Counted(nn.Module):
    """Reads the dtype of integers alone."""

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return torch.arange(ids.size(1), dtype=ids.dtype) + ids + x


class Promoted(nn.Module):
    """Asks torch for the dtype of a sum."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(4, dtype=torch.result_type(x, 1.0)) + x


class Mixed(nn.Module):
    """Computes in whatever dtype it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x * 2.5, -1) + torch.ones_like(x) + torch.ones(4)


X = torch.randn(3, 4)


@pytest.mark.parametrize("make", [Limits, Ones, Promoted])
def test_another_dtype_is_refused_with_the_line_that_reads_it(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    captured = capture(model, X)
    assert torch.equal(captured(X), model(X))
    with pytest.raises(
        CaptureError, match=r"`(x|ids)` has dtype torch\.float16.* captured for torch.float32"
    ) as caught:
        captured(X.half())
    place = line_of(type(model), "return")
    assert f"as the model reads it at {__file__}:{place}, in forward; pass torch.float32, or" in str(caught.value)


def test_a_model_that_reads_no_dtype_takes_any() -> None:
    captured = capture(Mixed().eval(), X)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        found, expected = captured(X.to(dtype)), Mixed()(X.to(dtype))
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_only_dtypes_of_the_kind_that_is_read_are_checked() -> None:
    ids = torch.zeros(3, 4, dtype=torch.int64)
    captured = capture(Counted().eval(), (ids, X))
    assert torch.equal(captured(ids, X.double()), Counted()(ids, X.double()))
    with pytest.raises(CaptureError, match=r"`ids` has dtype torch\.int32"):
        captured(ids.int(), X)


def test_inputs_follow_a_module_that_is_moved(tmp_path: Path) -> None:
    model = Computes(lambda m, x: m.linear(x) if x.dtype.is_floating_point else x, linear=nn.Linear(4, 4)).eval()
    moved = capture(copy.deepcopy(model), X).double()
    assert torch.equal(moved(X.double()), model.double()(X.double()))
    with pytest.raises(CaptureError, match=r"dtype torch\.float16.*; pass torch\.float64"):
        moved(X.half())
    for other in in_every_form(moved, tmp_path):
        assert torch.equal(other(X.double()), moved(X.double()))
        with pytest.raises(CaptureError, match="float16"):
            other(X.half())


def test_a_module_without_parameters_is_for_one_dtype() -> None:
    captured = capture(Limits().eval(), X).double()
    with pytest.raises(CaptureError, match=r"dtype torch\.float64"):
        captured(X.double())


def test_what_torch_itself_reads_does_not_count() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.BatchNorm1d(4), nn.Softmax(-1)).eval()
    captured = capture(copy.deepcopy(model), X)
    assert torch.equal(captured.double()(X.double()), model.double()(X.double()))
    guards = captured.get_submodule("_guards_fn")
    assert isinstance(guards, InputGuards)
    assert guards.specs[0].read_at is None
