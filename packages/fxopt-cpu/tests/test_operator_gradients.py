"""Operators called where autograd records: the gradients are those of the reference, or there is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from packed_bytes import pack_bytes
from torch import Tensor
from torch.autograd import forward_ad

from fxopt_cpu.layers.epilogue import Norm
from fxopt_cpu.library import OPERATORS
from fxopt_cpu.operators.conv import pack_convolution
from fxopt_cpu.operators.linear import pack, quantize
from fxopt_cpu.operators.plan import PlanBuilder

EPSILON = 1e-5
BY_NAME = {operator.name: operator for operator in OPERATORS}


def row(*shape: int) -> Tensor:
    return torch.randn(*shape)


PANELS, KERNEL = pack(row(16, 32)), pack_convolution(row(4, 3, 3, 3))
IDS = torch.tensor([[0, 2], [1, 1]])
CALLS: dict[str, tuple[Callable[[Tensor], list[Any]], Tensor]] = {
    "linear": (
        lambda x: [x, PANELS, None, None, None, 16, 2, 0.0, 0.0, None, 1, None, None, EPSILON, False, None],
        row(2, 32),
    ),
    "attention": (lambda x: [*x, None, 0.5, True], row(3, 1, 2, 4, 8)),
    "attention_merged": (lambda x: [x, 2, 1, None, 0.5, False], row(1, 5, 32)),
    "norm": (lambda x: [x, None, None, None, EPSILON, 2], row(3, 8)),
    "embedding_norm": (lambda table: [[IDS], [table], None, None, EPSILON, 1], row(3, 8)),
    "conv": (lambda x: [x, KERNEL, None, 4, [3, 3], [1, 1], [1] * 4, [1, 1], 1, 1, 0.0, 0.0, None], row(1, 3, 5, 5)),
}


def total(result: Any) -> Tensor:
    squares: Tensor = result.square().sum()
    return squares


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, by `forward_ad`
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_the_reference(name: str) -> None:
    arguments, value = CALLS[name]
    operator, reference = getattr(torch.ops.fxopt, name), BY_NAME[name].reference
    expected = torch.func.grad(lambda x: total(reference(*arguments(x))))(value)
    leaf = value.clone().requires_grad_()
    with torch.no_grad():
        assert not total(operator(*arguments(leaf))).requires_grad
    total(operator(*arguments(leaf))).backward()  # type: ignore[no-untyped-call]  # untyped in torch, as what follows
    assert expected.abs().sum() > 0
    for found in (leaf.grad, torch.func.grad(lambda x: total(operator(*arguments(x))))(value)):
        torch.testing.assert_close(found, expected)
    if "attention" in name:
        return  # of which torch has no forward derivative
    with forward_ad.dual_level():
        given = forward_ad.make_dual(value, torch.ones_like(value))  # type: ignore[no-untyped-call]
        dual = forward_ad.unpack_dual(total(operator(*arguments(given))))  # type: ignore[no-untyped-call]
        torch.testing.assert_close(dual.tangent, expected.sum(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", CALLS)
def test_shapes_are_known_without_running(name: str) -> None:
    arguments, value = CALLS[name]
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.fxopt, name).default, tuple(arguments(value)), test_utils=utilities)


def test_what_has_no_derivative_refuses() -> None:
    assert {*CALLS, "run"} == set(BY_NAME)
    x = row(2, 32).requires_grad_()
    panels, scale, sums = pack_bytes(*quantize(row(16, 32)))
    options = [16, 0, 0.0, 0.0, None, 0, None, None, 0.0, False, None]
    with pytest.raises(RuntimeError, match="fxopt::linear has no derivative for plans and int8 weights"):
        torch.ops.fxopt.linear(x, panels, scale, sums, None, *options)
    builder = PlanBuilder()
    builder.output(builder.norm(builder.input(x), norm=Norm("layer", EPSILON)))
    plan = builder.build()
    with pytest.raises(RuntimeError, match="fxopt::run has no derivative"):
        plan(x)
    with torch.no_grad():
        torch.ops.fxopt.linear(x, panels, scale, sums, None, *options)
