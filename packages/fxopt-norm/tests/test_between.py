"""Batch norms that are nearly behind a layer are refused and not passed over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from norm_models import Computes
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_core import history
from fxopt_norm import FuseBatchNorm1dInConv1d, FuseBatchNorm1dInLinear, FuseBatchNorm2dInConv2d
from fxopt_testing import assert_left_alone, assert_rewrites
from fxopt_testing.forms import TRACED, Form
from fxopt_testing.rewrites import graph_of, refused

# By day, dynamic sizes stand for fixed ones.
FORMS = [*TRACED, "export-dynamic", pytest.param("export", marks=pytest.mark.nightly)]
BETWEEN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "dropout": lambda m, x: m.drop(x),
    "identity": lambda m, x: m.same(x),
    "function": lambda m, x: F.dropout(x, 0.5, m.training),
    "copy": lambda m, x: x.clone(),
    "cast": lambda m, x: x.to(torch.float32, copy=True),
}


def around(between: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """A convolution, something, and batch norm."""
    parts = {"conv": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4), "drop": nn.Dropout(), "same": nn.Identity()}
    return Computes(lambda m, x: m.norm(between(m, m.conv(x))), **parts)


def fold(model: nn.Module, form: Form, x: Tensor) -> GraphModule:
    """Fold what can be; nothing can."""
    graph_module = graph_of(model.eval(), form, x)
    code = graph_module.code
    FuseBatchNorm2dInConv2d()(graph_module, expect=0)
    assert graph_module.code == code
    return graph_module


@pytest.mark.parametrize("between", BETWEEN)
def test_what_stands_between_is_named(between: str) -> None:
    graph_module = fold(around(BETWEEN[between]), "modules", torch.randn(2, 3, 5, 5))
    (refusal,) = history(graph_module)[-1].refusals
    assert refusal.reason == "not-adjacent"
    assert len(refusal.nodes) == 3
    assert f"`{refusal.nodes[1]}` is between layer `" in refusal.message


ON_ROWS: dict[str, Callable[[Any, Tensor], Any]] = {
    "LeViT": lambda m, x: m.norm((y := m.dense(x)).flatten(0, 1)).reshape_as(y) + x.sum(),
    "reshape": lambda m, x: m.norm(m.dense(x).reshape(-1, 6)).view(2, 3, 6),
    "rows": lambda m, x: m.norm(m.dense(x).view(-1, 6)).relu_(),
    "returned": lambda m, x: (y := m.norm(m.dense(x).flatten(0, 1)), y.sum()),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ON_ROWS)
def test_linear_layers_on_rows(name: str, form: Form) -> None:
    model = Computes(ON_ROWS[name], dense=nn.Linear(4, 6), norm=nn.BatchNorm1d(6))
    x = torch.randn(2, 3, 4)
    folded = assert_rewrites(FuseBatchNorm1dInLinear(), model, x, count=1, form=form, refused=())
    assert "reshape_as" not in folded.code


NOT_ON_ROWS: dict[str, tuple[str, Callable[[Any, Tensor], Any]]] = {
    "other features": ("not-adjacent", lambda m, x: m.wide(m.dense(x).flatten(1))),
    "three dimensions": ("wrong-axis", lambda m, x: m.norm(m.dense(x).view(1, 6, 6))),
    "transposed": ("not-adjacent", lambda m, x: m.norm(m.dense(x).transpose(1, 2))),
    "layer read": ("several-users", lambda m, x: m.norm((y := m.dense(x)).flatten(0, 1)) * y.sum()),
    "rows read": ("several-users", lambda m, x: m.norm(y := m.dense(x).flatten(0, 1)) * y),
}


@pytest.mark.parametrize("name", NOT_ON_ROWS)
def test_other_views_are_refused(name: str) -> None:
    reason, forward = NOT_ON_ROWS[name]
    model = Computes(forward, dense=nn.Linear(4, 6), norm=nn.BatchNorm1d(6), wide=nn.BatchNorm1d(18))
    assert_left_alone(FuseBatchNorm1dInLinear(), model, torch.randn(2, 3, 4), reason=reason)


def test_rows_of_unknown_shape_are_refused() -> None:
    graph_module = torch.fx.symbolic_trace(Computes(ON_ROWS["LeViT"], dense=nn.Linear(4, 6), norm=nn.BatchNorm1d(6)))
    assert_left_alone(FuseBatchNorm1dInLinear(), graph_module, torch.randn(2, 3, 4), reason="shape-unknown")


def test_another_pass_has_nothing_to_say() -> None:
    graph_module = graph_of(around(BETWEEN["dropout"]).eval(), "modules", torch.randn(2, 3, 5, 5))
    for other in (FuseBatchNorm1dInLinear(), FuseBatchNorm1dInConv1d()):
        other(graph_module, strict=True, expect=0)


@pytest.mark.parametrize("between", [lambda m, x: x.relu(), lambda m, x: x + 1, lambda m, x: m.same(m.drop(x))])
def test_what_computes_and_chains_are_no_near_misses(between: Callable[[Any, Tensor], Tensor]) -> None:
    assert not refused(fold(around(between), "modules", torch.randn(2, 3, 5, 5)))
