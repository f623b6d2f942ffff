"""`verify` sees later calls and gradients, and reports strides and lost NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from verified_calls import Calls

from fxopt_core import PreconditionError, VerificationError
from fxopt_tools import verify

X = torch.randn(3, 4)


class Scaled(nn.Module):
    """Computes the same at each call, but that `late` gives it something else to do from some call on."""

    scale: Tensor

    def __init__(self, late: Callable[[Tensor], Tensor] = torch.neg, since: int = 9) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.calls = iter(range(1, 99))  # which `verify` cannot bring back
        self.since, self.late = since, late

    def forward(self, x: Tensor) -> Tensor:
        """Return a product."""
        return self.late(x) if next(self.calls) >= self.since else x * self.scale


@pytest.mark.parametrize("since", [1, 2, 3])
def test_each_of_three_calls_is_judged(since: int) -> None:
    report = verify(Scaled(), Scaled(since=since), X)
    assert not report
    assert len(report.outputs) == 1
    assert ("after several calls" in str(report)) == (since > 1)
    with pytest.raises(VerificationError, match="`output` of input 0"):
        report.raise_if_failed()


def test_rounding_that_starts_later_is_allowed() -> None:
    report = verify(Scaled(), Scaled(lambda x: x * (2.0 + 1e-6), since=2), [X, X])
    assert report
    assert [output.max_absolute_error > 0 for output in report.outputs] == [True, True]  # type: ignore[operator]


def test_later_calls_have_the_buffers_that_calls_have_afterwards() -> None:
    """Programs that were made of them stay valid."""
    seen: list[int] = []

    class Seeing(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            """Note the buffer."""
            seen.append(id(self.running_mean))
            return super().forward(input)

    norm = Seeing(4).eval()
    assert verify(nn.BatchNorm1d(4).eval(), norm, X)
    assert seen[0] != id(norm.running_mean)
    assert seen[1:] == [id(norm.running_mean)] * 2
    norm.train()
    state = {name: each.clone() for name, each in norm.state_dict().items()}
    verify(nn.BatchNorm1d(4), norm, X)
    torch.testing.assert_close(dict(norm.state_dict()), state, rtol=0, atol=0)


def test_strides_are_judged() -> None:
    """But those of dimensions with one entry, which mean nothing."""
    report = verify(Calls(lambda x: x + 1), Calls(lambda x: (x + 1).t().contiguous().t()), X)
    assert report.outputs[0].problem == (
        "has strides (1, 3), expected (4, 1) as in the original: a view of it may differ, or raise"
    )
    assert verify(Calls(torch.sin), Calls(lambda x: x.sin().t().contiguous().t()), X[:1])


def test_strides_are_those_with_gradients_or_without() -> None:
    """Self-attention has others on its fast path, which a captured graph does not take."""
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    with_gradients = layer(x, x, x)[0].stride()

    def like(strides: Sequence[int]) -> nn.Module:
        return Calls(lambda x, *_: (torch.empty_strided(x.shape, strides).copy_((y := layer(x, x, x))[0]), y[1]))

    assert with_gradients != layer.requires_grad_(False)(x, x, x)[0].stride()
    assert verify(layer, layer, (x, x, x))
    assert verify(layer, like(with_gradients), (x, x, x))
    assert not verify(layer, like((1, 2, 10)), (x, x, x))


class Counting(nn.Module):
    """Keeps what decides its result in an attribute: at the first call the input, later what `late` makes of it."""

    def __init__(self, late: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.late, self.calls, self.seen = late, 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        """Return it."""
        self.calls += 1
        self.seen.append(self.calls)
        return x if self.calls == 1 else self.late(x)


@pytest.mark.parametrize("late", [torch.neg, lambda x: x.t().contiguous().t()], ids=["values", "strides"])
def test_what_later_calls_read_from_attributes_is_seen(late: Callable[[Tensor], Tensor]) -> None:
    plain, late_one = Calls(lambda x: x), Counting(late)
    report = verify(plain, late_one, X)
    assert not report
    assert "after several calls" in str(report)
    assert (late_one.calls, late_one.seen) == (0, [])  # it is put back
    assert verify(Counting(late), late_one, X), "each call is compared with the same call of the original"


def test_lost_nans_are_counted() -> None:
    x = X.clone()
    x[1, 2] = math.nan
    report = verify(nn.ReLU(), Calls(lambda x: x.nan_to_num().relu()), x)
    assert not report
    assert report.notes[-1] == "`output` of input 0 has 1 element that is NaN only in the original"


def test_gradients_are_judged_on_request() -> None:
    """Of inputs and of parameters."""
    model, detached = nn.Linear(4, 4), nn.Linear(4, 4)
    detached.load_state_dict(model.state_dict())
    model.bias.requires_grad_(False)
    assert verify(model, detached, X, gradients=True)
    report = verify(model, model, X, gradients=True)
    assert [output.path for output in report.outputs] == ["output", "gradient of `args[0]`", "gradient of `weight`"]
    assert report.outputs[-1].reference == "float64"
    wrong = Calls(lambda x: nn.functional.linear(x.detach(), model.weight, model.bias))
    assert verify(model, wrong, X)
    report = verify(model, wrong, X, gradients=True)
    assert [output.path for output in report.failures] == ["gradient of `args[0]`"]
    assert all(each.grad is None for each in (*model.parameters(), X))


def test_parameters_of_other_names_have_gradients_that_are_not_compared() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    renamed = nn.Sequential()
    renamed.add_module("0", model[0])
    renamed.add_module("last", model[1])
    report = verify(model, renamed, X, gradients=True)
    assert report
    assert report.notes[-1].startswith("not compared: the gradient of `1.weight` and 1 other, since")


def test_a_model_without_gradients_is_refused_in_words() -> None:
    class Written(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            """Overwrite what the gradient is computed from."""
            return x.exp().mul_(2)

    with pytest.raises(PreconditionError, match=r"the original, with gradients, \(Written\) refuses input 0"):
        verify(Written(), Written(), X, gradients=True)
