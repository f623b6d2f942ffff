"""The criterion, condition by condition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fxopt_rewrite import (
    Tolerance,
    tolerance,
)
from fxopt_tools.verification.closeness import Criterion, is_rounding, measure, rms, sqnr_db

FLOAT32 = Criterion(tolerance(torch.float32), torch.finfo(torch.float32).eps)
STATED = Criterion(Tolerance(rtol=0.1, atol=0.5))


def passes(a: Tensor, b: Tensor, criterion: Criterion = FLOAT32) -> bool:
    return measure(a, b, criterion).passed


def test_a_small_element_among_large_ones_may_be_as_wrong_as_these() -> None:
    a = 100 * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    a[7] = 0.01
    one = torch.arange(1000) == 7
    assert passes(a, a + 2e-3 * one)
    assert not passes(a, a + 0.1 * one)
    assert not passes(a[one], a[one] + 2e-3)


def test_numbers_that_are_not_finite_have_to_be_the_same_at_the_same_place() -> None:
    a = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    assert passes(a, a.clone()) and sqnr_db(a, a.clone()) == math.inf
    for place in range(4):
        for other in (math.nan, math.inf, -math.inf, 0.0):
            b = a.clone()
            b[place] = other
            same = a[place].item() == other or (place == 0 and math.isnan(other))
            assert passes(a, b) == same
            if not same:
                measurement = measure(a, b, FLOAT32)
                assert measurement.differing == 1 and measurement.worst is not None
                assert measurement.worst.index == (place,)
                assert (measurement.max_absolute_error == math.inf) == (place < 3 or other != 0)
                assert sqnr_db(a, b) == (-math.inf if place < 3 or other != 0 else sqnr_db(a[3:], b[3:]))


def test_rounding_is_what_the_original_has_itself() -> None:
    t = torch.randn(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(2, 4000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 1e-2
    a, b = t + noise[0], t + noise[1]
    assert is_rounding(a, b, t, FLOAT32)
    assert not is_rounding(a, b + 0.06, t, FLOAT32), "wrong as a whole"
    assert not is_rounding(a, torch.where(torch.arange(4000) == 7, b + 1, b), t, FLOAT32), "wrong at one place"
    assert not is_rounding(t, b, t, FLOAT32), "an original without rounding excuses nothing"
    assert not is_rounding(t + 20 * noise[0], t + 20 * noise[1], t, FLOAT32), "too far from the truth to tell"
    assert not is_rounding(a, b * math.nan, t, FLOAT32)
    assert not is_rounding(a, b, t, STATED), "a stated tolerance is meant"


def test_ratio_of_signal_and_noise() -> None:
    a = torch.tensor([10.0, 10.0])
    assert sqnr_db(a, a + torch.tensor([1.0, -1.0])) == pytest.approx(20)
    assert sqnr_db(a, a) == math.inf and sqnr_db(torch.zeros(2), torch.zeros(2)) == math.inf
    assert sqnr_db(torch.zeros(2), a) == -math.inf
    huge = torch.tensor([1e300, 1e300], dtype=torch.float64)
    assert sqnr_db(huge, huge * 1.1) == pytest.approx(20) and rms(huge) == pytest.approx(1e300)
