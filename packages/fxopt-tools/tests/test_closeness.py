"""The criterion, condition by condition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fxopt_rewrite import (
    Tolerance,
    tolerance,
)
from fxopt_tools.verification.closeness import Criterion, is_rounding, measure, rms, sqnr_db

FLOAT32 = Criterion(tolerance(torch.float32), torch.finfo(torch.float32).eps)
STATED = Criterion(Tolerance(rtol=0.1, atol=0.5))
EXACT = Criterion(None)


def passes(a: Tensor, b: Tensor, criterion: Criterion = FLOAT32) -> bool:
    return measure(a, b, criterion).passed


def test_a_small_element_among_large_ones_may_be_as_wrong_as_these() -> None:
    a = 100 * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    a[7] = 0.01
    one = torch.arange(1000) == 7
    assert passes(a, a + 2e-3 * one)
    assert not passes(a, a + 0.1 * one)
    assert not passes(a[one], a[one] + 2e-3)


def test_one_outlier_among_many_does_not_excuse_the_rest() -> None:
    a = torch.ones(4096, dtype=torch.float64)
    a[0] = 1000
    b = a.clone()
    b[1] += 0.01
    assert not passes(a, b)


def test_an_output_that_is_small_throughout_has_to_agree_as_a_whole() -> None:
    a = torch.full((1000,), 1e-5)
    measurement = measure(a, 2 * a, FLOAT32)
    assert not measurement.passed and not measurement.differing and measurement.relative_rms == pytest.approx(1)
    assert passes(a, 1.01 * a)
    assert passes(a / 100, a / 50), "smaller than what is left where terms of size 1 cancel"
    assert passes(a, torch.where(torch.arange(1000) == 0, 2 * a, a)), "an element alone may be wrong by atol"


def test_a_stated_tolerance_is_not_scaled() -> None:
    a = torch.tensor([100.0, 1e-4])
    assert passes(a, a + 0.5, STATED) and not passes(a, a + torch.tensor([0, 0.6]), STATED)
    assert passes(a, a + torch.tensor([10.4, 0]), STATED) and not passes(a, a + torch.tensor([10.6, 0]), STATED)
    assert passes(a / 1e9, a, Criterion(Tolerance(0.0, 1000.0)))


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


def test_complex_numbers_are_compared_by_distance() -> None:
    a = torch.tensor([3 + 4j, 0j])
    measurement = measure(a, a + 1j, FLOAT32)
    assert measurement.max_absolute_error == 1 and measurement.max_relative_error == pytest.approx(0.2)
    assert measurement.worst is not None and measurement.worst.found in (3 + 5j, 1j)
    assert passes(a, a + 1e-6j) and not passes(a, a * torch.tensor(complex(math.nan, 0)))


def test_large_integers_are_told_apart() -> None:
    a = torch.tensor([2**60])
    assert passes(a, a.clone(), EXACT)
    measurement = measure(a, a + 1, EXACT)
    assert measurement.differing == 1 and measurement.max_absolute_error == 1
    assert measurement.worst is not None and measurement.worst.found == 2**60 + 1


def test_sparse_quantised_and_8_bit_tensors_are_compared_by_value() -> None:
    a = torch.eye(3)
    assert passes(a.to_sparse(), a.to_sparse()) and not passes(a.to_sparse(), (2 * a).to_sparse())
    eight = a.to(torch.float8_e4m3fn)
    assert passes(eight, eight.clone()) and measure(eight, eight.clone(), FLOAT32).max_absolute_error == 0
    assert passes(a.to_sparse().long(), a.to_sparse().long(), EXACT)


def test_tensors_without_dimensions_or_elements() -> None:
    assert passes(torch.tensor(1.0), torch.tensor(1.0)) and not passes(torch.tensor(1.0), torch.tensor(1.1))
    assert measure(torch.tensor(1.0), torch.tensor(2.0), FLOAT32).worst is not None
    assert passes(torch.ones(0, 3), torch.ones(0, 3)) and passes(torch.ones(0).long(), torch.ones(0).long(), EXACT)


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


finite = st.floats(-1e4, 1e4, width=32)


@settings(max_examples=100, deadline=None)
@given(st.lists(finite.filter(bool), min_size=1, max_size=30), st.integers(-20, 20))
def test_scaling_by_a_power_of_two_keeps_a_failure_of_large_outputs(values: list[float], power: int) -> None:
    a = torch.tensor(values, dtype=torch.float64)
    b = a + 1e-3 * rms(a)
    a, b = a * 2.0**power, b * 2.0**power
    expected = rms(a) == 0 or (rms(a) < 1 and passes(a, b))
    assert passes(a, b) == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(finite, min_size=1, max_size=30), st.lists(finite, min_size=30, max_size=30))
def test_what_passes_is_within_the_tolerance_of_the_largest_element(values: list[float], shifts: list[float]) -> None:
    a = torch.tensor(values)
    b = a + torch.tensor(shifts[: len(values)]) * 1e-8
    if passes(a, b):
        largest = max(1.0, a.abs().max().item())
        assert (a.double() - b.double()).abs().max().item() <= (1e-4 + 1e-5) * largest
