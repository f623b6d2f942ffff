"""`FuseActivations`: activations that are written out become one call, in whatever order they are written."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from simplify_models import X
from site_passes import Called
from torch import Tensor, nn

from fxopt_core import iter_nodes
from fxopt_rewrite import infer_shapes
from fxopt_simplify import FuseActivations
from fxopt_testing import assert_rewrites
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import refused

FORMS: tuple[Form, ...] = ("functions", "export-dynamic")
ROOT = math.sqrt(2.0 / math.pi)

WRITTEN: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "GELU of BERT": ("gelu", lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
    "GELU of half the product": ("gelu", lambda x: x * torch.erf(x * 0.7071067811865476).add(1).mul(0.5)),
    "GELU of GPT-2": ("gelu", lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0))))),
    "GELU multiplied out": ("gelu", lambda x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x)))),
    "GELU in two terms": ("gelu", lambda x: x / 2 + torch.tanh(ROOT * (0.044715 * x**3 + x)) * x / 2),
    "GELU of two halves": ("gelu", lambda x: x * (0.5 + 0.5 * torch.erf(x / math.sqrt(2.0)))),
    "GELU of a cubic in two terms": ("gelu", lambda x: 0.5 * x * (1 + torch.tanh(ROOT * x + ROOT * 0.044715 * x**3))),
    "SiLU": ("silu", lambda x: x * torch.sigmoid(x)),
    "SiLU the other way round": ("silu", lambda x: x.sigmoid() * x),
    "Mish": ("mish", lambda x: x * torch.tanh(F.softplus(x))),
    "hardswish": ("hardswish", lambda x: x * F.relu6(x + 3.0) / 6.0),
    "hardswish by six first": ("hardswish", lambda x: x * (F.hardtanh(3 + x, 0.0, 6.0) / 6.0)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", WRITTEN)
def test_a_written_activation_becomes_one_call(name: str, form: Form) -> None:
    function, written = WRITTEN[name]
    model = nn.Sequential(nn.Linear(X.shape[-1], 6), Called(written))
    found = assert_rewrites(FuseActivations(), model, X, count=1, form=form, others=[(X[:1],)])
    called = [str(node.target) for node in iter_nodes(found.graph) if node.op == "call_function"]
    assert sum(function in each for each in called) == 1
    assert not any(word in each for each in called for word in ("erf", "tanh", "sigmoid", "softplus", "mul"))


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "another constant": lambda x: x * 0.5 * (1.0 + torch.erf(x / 1.4)),
    "the sigmoid of another value": lambda x: x * torch.sigmoid(x + 1),
    "a steeper softplus": lambda x: x * torch.tanh(F.softplus(x, beta=2)),
    "a sum with a factor": lambda x: x * torch.add(torch.erf(x * math.sqrt(0.5)), 1, alpha=2) * 0.5,
    "a quotient that is rounded": lambda x: x * torch.div(1 + torch.erf(x * math.sqrt(0.5)), 2, rounding_mode="floor"),
    "quick GELU, which torch has no function for": lambda x: x * torch.sigmoid(1.702 * x),
    "a product with a computed value": lambda x: x * torch.sigmoid(x * x.mean()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_an_activation_stays(name: str) -> None:
    assert_rewrites(FuseActivations(), Called(OTHERS[name]), X, count=0, form="export-dynamic")


def _read_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    gate = torch.sigmoid(x)
    return x * gate, gate


def _written_between(x: Tensor) -> Tensor:
    y = x.clone()
    gate = torch.sigmoid(y)
    y.add_(1)
    return y * gate


@pytest.mark.parametrize(
    ("reason", "function", "inputs"),
    [
        ("several-users", _read_twice, X),
        ("unsupported-dtype", lambda x: x * torch.sigmoid(x), X.bfloat16()),
        ("mutated", _written_between, X),
    ],
    ids=["read twice", "bfloat16", "written"],
)
def test_refusals(reason: str, function: Callable[[Tensor], Tensor], inputs: Tensor) -> None:
    graph_module = infer_shapes(torch.fx.symbolic_trace(Called(function)), inputs)
    FuseActivations()(graph_module)
    assert [found for _, found in refused(graph_module)] == [reason]


def test_without_shapes_the_dtype_is_unknown() -> None:
    graph_module = torch.fx.symbolic_trace(Called(lambda x: x * torch.sigmoid(x)))
    FuseActivations()(graph_module)
    assert refused(graph_module) == [("mul", "shape-unknown")]
