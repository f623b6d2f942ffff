"""`verify` says what it could not compare, and does not pass where it saw nothing; it compares buffers, too."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from verified_calls import Calls, X

from fxopt_core import VerificationError
from fxopt_tools import VerificationReport, verify

NAN = torch.full((3,), math.nan)


def same(function: Callable[..., Any], *args: Any) -> VerificationReport:
    return verify(Calls(function), Calls(function), args or (X,))


NOTHING: dict[str, Callable[[Tensor], Any]] = {
    "no output": lambda x: None,
    "an empty tuple": lambda x: (),
    "no elements": lambda x: x[:0],
    "NaN throughout": lambda x: NAN,
    "infinite throughout": lambda x: x.abs() / 0,
    "whole numbers": lambda x: x.argmax(-1),
    "booleans": lambda x: x > 0,
    "a Python number": lambda x: 3,
    "text": lambda x: "text",
    "a NaN": lambda x: math.nan,
    "several of these": lambda x: (x[:0], NAN, x.long(), {"a": None}),
}


@pytest.mark.parametrize("what", NOTHING)
def test_a_verification_that_saw_nothing_does_not_pass(what: str) -> None:
    report = same(NOTHING[what])
    assert not report and not report.passed and not report.saw_something
    assert report.failures == () and report.worst is None
    assert str(report).startswith("FAILED: ") and "the verification saw nothing" in str(report)
    with pytest.raises(VerificationError, match=r"the verification saw nothing: .*What to do: verify with inputs"):
        report.raise_if_failed()


@pytest.mark.parametrize("what", NOTHING)
def test_a_number_beside_it_is_enough(what: str) -> None:
    report = same(lambda x: (NOTHING[what](x), x))
    assert report and report.saw_something
    report.raise_if_failed()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (X[:0], "`output[0]` of input 0 has no elements"),
        (NAN, "`output[0]` of input 0 is NaN throughout in both"),
        (X.abs() / 0, "`output[0]` of input 0 is infinite or NaN throughout in both"),
    ],
)
def test_what_was_not_compared_is_told(value: Tensor, reason: str) -> None:
    report = same(lambda x: (value, x))
    assert report and f"not compared: {reason}" in str(report)
    row = next(line for line in str(report).splitlines() if line.startswith("output[0]"))
    assert row.endswith("not compared")


def test_single_nans_are_told() -> None:
    report = same(lambda x: x.clone().index_fill(0, torch.tensor([1]), math.nan))
    assert report and "`output` of input 0 has 4 elements that are NaN in both" in report.notes
    assert not verify(Calls(lambda x: NAN), Calls(lambda x: torch.ones(3)), X)


def test_one_input_that_shows_something_is_enough_and_the_other_is_told() -> None:
    report = verify(Calls(lambda x: x * 2), Calls(lambda x: x * 2), [X[:0], X])
    assert report and "not compared: `output` of input 0 has no elements" in str(report)
    assert not verify(Calls(lambda x: x * 2), Calls(lambda x: x * 2), [X[:0], X[:0]])


def test_what_the_call_writes_counts() -> None:
    assert same(lambda x: None if x.mul_(2) is x else 0, X.clone())
    batch_norm = nn.BatchNorm1d(4)
    assert verify(nn.Sequential(batch_norm, Calls(lambda x: None)), nn.Sequential(batch_norm, Calls(lambda x: None)), X)


# --- Buffers


class Counts(nn.Module):
    """Has a running mean, by one way of writing or another."""

    def __init__(self, momentum: float = 0.1, way: str = "in place", name: str = "mean") -> None:
        super().__init__()
        self.register_buffer(name, torch.zeros(4))
        self.register_buffer("other", torch.zeros(4))
        self.momentum, self.way, self.name = momentum, way, name

    def forward(self, x: Tensor) -> Tensor:
        mean = getattr(self, self.name)
        if self.way == "in place":
            mean.lerp_(x.mean(0), self.momentum)
        elif self.way == "anew":
            setattr(self, self.name, mean.lerp(x.mean(0), self.momentum))
        return x * 2


@pytest.mark.parametrize("way", ["in place", "anew"])
def test_buffers_that_the_call_writes_are_compared(way: str) -> None:
    original = Counts(way=way)
    report = verify(original, Counts(way="in place"), X)
    assert report and [output.path for output in report.outputs] == ["output", "mean after the call"]
    assert report.outputs[1].reference == "float64" and not original.get_buffer("mean").any()
    for other in (Counts(0.2, way), Counts(way="not at all")):
        for report in (verify(original, other, X), verify(other, original, X)):
            assert [output.path for output in report.failures] == ["mean after the call"], str(report)


def test_a_buffer_that_is_gone_is_wrong_and_one_that_is_renamed_is_told() -> None:
    report = verify(Counts(), Calls(lambda x: x * 2), X)
    assert not report and "is written by the original, and the other has no such buffer" in str(report)
    report = verify(Counts(), Counts(name="renamed"), X)
    assert report and "not compared: `mean after the call` of input 0 is written by the original" in str(report)
    assert "which writes `renamed`" in str(report)


def norm(model: nn.Module) -> nn.BatchNorm1d:
    return next(each for each in model.modules() if isinstance(each, nn.BatchNorm1d))


def test_batch_norm_in_train_mode_is_compared_with_its_statistics() -> None:
    original = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    report = verify(original, copy.deepcopy(original), X)
    assert report and {"1.running_mean after the call", "1.num_batches_tracked after the call"} <= {
        output.path for output in report.outputs
    }
    wrong = copy.deepcopy(original)
    norm(wrong).momentum = 0.2
    assert not verify(original, wrong, X) and not original.get_buffer("1.running_mean").any()
    assert [output.path for output in verify(original.eval(), wrong.eval(), X).outputs] == ["output"]
