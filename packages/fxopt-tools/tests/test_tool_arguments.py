"""Arguments that make no sense, values that cannot be compared, and threads that verify at the same time."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from verified_calls import Calls

from fxopt_core import PreconditionError
from fxopt_tools import Verify, verify


class Opaque:
    """Without attributes, and equal to itself alone."""

    __slots__ = ()


X = torch.ones(2)
ODD_NUMBERS = ["1e-3", True, 1j, [1e-3], torch.ones(2), float("nan"), -1, float("inf")]


@pytest.mark.parametrize("name", ["rtol", "atol"])
@pytest.mark.parametrize("value", ODD_NUMBERS, ids=str)
def test_tolerances_are_numbers(name: str, value: Any) -> None:
    wrong = {name: value}
    with pytest.raises(PreconditionError, match=rf"^{name} is {re.escape(repr(value))}, expected a finite number"):
        verify(nn.ReLU(), nn.ReLU(), X, **wrong)
    with pytest.raises(PreconditionError, match=rf"^{name} is .*, expected a finite number"):
        Verify(X, **wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_failure": "ignore"}, "^on_failure is 'ignore', expected 'raise' or 'veto'"),
        ({"inputs": []}, "^inputs is an empty list, expected"),
    ],
)
def test_a_gate_refuses_arguments_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PreconditionError, match=message):
        Verify(**{"inputs": X, **arguments})


class TestValuesThatCannotBeCompared:
    @pytest.mark.parametrize(
        ("name", "function"),
        [
            ("set", lambda x: {x}),
            ("frozenset", lambda x: frozenset([x, 1])),
            ("generator", lambda x: (each for each in x)),
            ("list_iterator", lambda x: iter([x])),
            ("Opaque", lambda x: Opaque()),
        ],
    )
    def test_they_are_no_evidence_and_the_report_says_why(
        self, name: str, function: Callable[[Tensor], object]
    ) -> None:
        report = verify(Calls(function), Calls(function), X)
        assert not report
        assert f"is of type {name} in both, which has no way to tell whether two of them are equal" in str(report)

    def test_sets_of_others_that_differ_are_shown(self) -> None:
        report = verify(Calls(lambda x: {1}), Calls(lambda x: {2}), X)
        assert "is set {2}, expected set {1} as in the original" in str(report)


@pytest.mark.usefixtures("frequent_switches")
def test_random_numbers_of_threads_do_not_mix() -> None:
    """Threads share torch's generator, and here the module as well."""
    noisy = nn.Sequential(nn.Dropout(), nn.Linear(8, 8), nn.Dropout()).train()
    x = torch.randn(4, 8)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda _: verify(noisy, noisy, x), range(12)))
    assert all(reports)
    assert torch.equal(torch.rand(1), expected)
