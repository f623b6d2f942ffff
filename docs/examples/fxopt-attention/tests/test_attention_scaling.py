from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from fxopt_attention import FoldQueryScale
from fxopt_checkpoints import load_original_state_dict, original_state_dict
from fxopt_testing import assert_left_alone, assert_rewrites, conformance_tests


class Scaled(nn.Module):
    """A linear layer, and the product of what it computes with a number."""

    def __init__(self, factor: object = 0.125, *, bias: bool = True) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4, bias=bias), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.factor * self.linear(x)
        return y


class ReadTwice(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        z: torch.Tensor = y * 2.0 + y
        return z


class Written(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        z: torch.Tensor = y * 2.0 + y.add_(1.0)
        return z


class Twice(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x).mul(2.0) * 3
        return y


X = torch.randn(3, 4)

test_conformance = conformance_tests(FoldQueryScale())


@pytest.mark.parametrize("form", ["modules", "functions", "export"])
@pytest.mark.parametrize("bias", [True, False])
def test_every_form_of_graph(form: Literal["modules", "functions", "export"], bias: bool) -> None:
    model = Scaled(bias=bias)
    result = assert_rewrites(FoldQueryScale(), model, X, count=1, form=form)
    torch.testing.assert_close(result.get_parameter("linear_scaled.weight"), model.linear.weight * 0.125)


def test_the_code_before_and_after() -> None:
    before = "linear = self.linear(x); mul = 0.125 * linear; return mul"
    after = "linear_scaled = self.linear_scaled(x); return linear_scaled"
    assert_rewrites(FoldQueryScale(), Scaled(), X, before=before, after=after)


def test_it_goes_on_until_no_factor_is_left() -> None:
    result = assert_rewrites(FoldQueryScale(), Twice(), X, count=2)
    assert len(result.graph.find_nodes(op="call_module")) == 1
    assert "*" not in result.code


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (ReadTwice(), "several-users"),
        (Written(), "several-users"),
        (Scaled(0.0), "out-of-range"),
        (Scaled(float("inf")), "out-of-range"),
        (Scaled(1e-60), "out-of-range"),
    ],
)
def test_near_misses(model: nn.Module, reason: str) -> None:
    assert_left_alone(FoldQueryScale(), model, X, reason=reason)


@pytest.mark.parametrize("factor", [True, nn.Parameter(torch.ones(4))])
def test_no_factors(factor: object) -> None:
    assert not assert_left_alone(FoldQueryScale(), Scaled(factor), X)


def test_checkpoints_go_in_and_come_back() -> None:
    graph_module = FoldQueryScale()(torch.fx.symbolic_trace(Scaled()), expect=1)
    other = Scaled()
    load_original_state_dict(graph_module, other.state_dict())
    torch.testing.assert_close(graph_module(X), other(X))
    state = original_state_dict(graph_module)
    assert list(state) == ["linear.weight", "linear.bias"]
    torch.testing.assert_close(state["linear.weight"], other.linear.weight.detach())
