"""`verify`: outputs of every dtype and size, what is not finite, and the tolerance that was used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from verified_calls import Calls, X

from fxopt_core import VerificationError
from fxopt_rewrite import tolerance
from fxopt_tools import VerificationReport, verify

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
COMPLEX = [torch.complex128, torch.complex64, torch.complex32]
WHOLE = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.uint64]


def gives(expected: Any, found: Any, **stated: Any) -> VerificationReport:
    """Compare two values; a number beside them, as a verification that sees none fails."""
    return verify(Calls(lambda x: (expected, x)), Calls(lambda x: (found, x)), X, **stated)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, *WHOLE], ids=str)
def test_every_dtype_agrees_with_itself_and_one_is_not_zero(dtype: torch.dtype) -> None:
    for shape in ((), (2, 1, 2)):
        one, zero = torch.ones(shape).to(dtype), torch.zeros(shape).to(dtype)
        assert gives(one, one.clone()) and gives(zero, zero.clone())
        assert not gives(one, zero) and not gives(zero, one)


def test_large_integers_are_told_apart() -> None:
    for dtype in (torch.int64, torch.uint64):
        large = torch.tensor([2**62], dtype=dtype)
        assert not gives(large, torch.tensor([2**62 + 1], dtype=dtype))


def test_a_small_output_that_is_known_exactly_may_not_be_lost() -> None:
    """Probabilities over a large vocabulary in half precision: atol alone would let zeros pass."""
    logits = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0))

    def verified(by: Callable[[Tensor], Tensor], dtype: torch.dtype) -> bool:
        softmax = Calls(lambda x: torch.softmax(x, -1))
        return verify(softmax, Calls(lambda x: by(torch.softmax(x, -1))), logits.to(dtype)).passed

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert verified(lambda p: p.clone(), dtype) and verified(lambda p: p * (1 + torch.finfo(p.dtype).eps), dtype)
        assert not verified(torch.zeros_like, dtype) and not verified(lambda p: p * 1.5, dtype)


# --- The tolerance that was used


def source(report: VerificationReport) -> str | None:
    return report.outputs[0].tolerance_source


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_it_is_that_of_the_dtype(dtype: torch.dtype) -> None:
    tensor = torch.ones(2).to(dtype)
    report = verify(Calls(lambda x: x + 0 if x.element_size() > 1 else x.clone()), Calls(lambda x: x.clone()), tensor)
    if dtype.itemsize > 1:
        assert (report.outputs[0].tolerance, source(report)) == (tolerance(dtype), f"of {str(dtype)[6:]}")
    expected = tolerance(dtype)
    assert f"rtol {expected.rtol:.3g}, atol {expected.atol:.3g} of {str(dtype)[6:]}" in str(report)


def test_it_is_that_in_which_the_original_computes_where_that_is_coarser() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Calls(lambda x: x.float())).bfloat16()
    report = verify(model, model, X.bfloat16())
    assert source(report) == "of bfloat16, in which the original computes"
    assert "atol 0.02 of bfloat16, in which the original computes" in str(report)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        linear = nn.Linear(4, 4)
        assert source(verify(linear, linear, X)) == "of bfloat16"


def test_it_is_as_stated() -> None:
    assert source(gives(X, X, rtol=0.0, atol=0.5)) == "as stated"
    assert source(gives(X, X, rtol=0.5)) == "as stated, the other of float32"
    assert source(gives(X, X, atol=0.5)) == "as stated, the other of float32"
    report = gives(X, X + 1, rtol=0.0, atol=0.5)
    assert "rtol 0, atol 0.5 as stated" in str(report)
    with pytest.raises(VerificationError, match=r"within 0\.5 \(rtol 0, atol 0\.5 as stated\)"):
        report.raise_if_failed()


def test_there_is_none_where_only_equality_will_do() -> None:
    report = gives(X.long(), X.long(), rtol=1.0, atol=1.0)
    assert source(report) is None and report.outputs[0].tolerance is None and "exact" in str(report)
    assert source(gives("text", "text")) is None
