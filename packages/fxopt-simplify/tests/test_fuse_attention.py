"""`FuseScaledDotProductAttention`: attention that is written out is fused where it computes the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt_core import history, iter_nodes, undo
from fxopt_rewrite import infer_shapes
from fxopt_simplify import FuseScaledDotProductAttention
from fxopt_testing import ModelCase, assert_rewrites, conformance_tests
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import refused, setitem

FORMS: tuple[Form, ...] = ("modules", "functions", "export-dynamic")
MIN = torch.finfo(torch.float32).min
Weights = Callable[[Tensor, Tensor, Tensor], Any]
X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
LONGER = torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(1))


def causal(q: Tensor) -> Tensor:
    """Return a mask of ones up to the diagonal."""
    return torch.tril(torch.ones((q.shape[2], q.shape[2]), dtype=torch.bool, device=q.device))


class Attends(nn.Module):
    """Self-attention of two heads, whose weights a function computes of queries, keys and hidden states."""

    def __init__(self, weights: Weights, *, joined: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v, self.bias = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.softmax, self.dropout = nn.Softmax(dim=-1), nn.Dropout(0.1)
        self.weights, self.joined = weights, joined

    def forward(self, x: Tensor) -> Tensor:
        rows, length = x.shape[0], x.shape[1]
        q, k, v = (each(x).view(rows, length, 2, 4).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = torch.matmul(self.weights(q, k, x), v)
        return y.transpose(1, 2).reshape(rows, length, 8) if self.joined else y


def modular(*, joined: bool = True) -> Attends:
    """Return an attention whose softmax and dropout are modules."""
    model = Attends(lambda q, k, x: None, joined=joined)
    model.weights = lambda q, k, x: model.dropout(model.softmax(q @ k.transpose(-2, -1) / 2.0))
    return model


def biased() -> Attends:
    """Return an attention with a computed bias for each head and position."""
    model = Attends(lambda q, k, x: None)

    def weights(q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        bias = model.bias(x).permute(0, 2, 1).unsqueeze(2)
        hidden = torch.where(x[:, None, None, :, 0] > 0, 0.0, MIN)
        return F.softmax(q @ k.transpose(2, 3) * 0.5 + bias + hidden, dim=-1)

    model.weights = weights
    return model


def smallest_in_rows(q: Tensor, k: Tensor, x: Tensor) -> Tensor:
    """Hide whole rows by the smallest number: each key counts the same there."""
    return torch.softmax((q @ k.mT).masked_fill(x[:, None, :, :1] > 0, MIN), -1)


def causally(q: Tensor, k: Tensor, fill: float) -> Tensor:
    """Hide what comes later, which leaves each row its first key."""
    scores = torch.matmul(q, k.permute(0, 1, 3, 2)) * 0.5
    return F.softmax(scores.masked_fill(~causal(q)[None, None], fill), dim=3, dtype=torch.float32).to(q.dtype)


FUSED: dict[str, Callable[[], nn.Module]] = {
    "modules": modular,
    "heads apart": lambda: modular(joined=False),
    "bias and mask": biased,
    "a causal mask": lambda: Attends(lambda q, k, x: causally(q, k, MIN)),
    "scaled queries, keys as they are multiplied": lambda: Attends(
        lambda q, k, x: torch.softmax((q * 0.5) @ (k.transpose(-2, -1) * 1.5), -1)
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", FUSED.values(), ids=list(FUSED))
def test_attention_is_fused_in_each_form(make: Callable[[], nn.Module], form: Form) -> None:
    torch.manual_seed(0)
    # Undoing does not restore the shape of every value, without which nothing is fused again.
    options: Any = {"others": [(LONGER,)], "again": False}
    assert_rewrites(FuseScaledDotProductAttention(), make().eval(), X, count=1, form=form, **options)


def test_masks_are_added_up_as_soon_as_they_are_known() -> None:
    """Or else sums would lie between the layers, and plans of them end there."""
    graph_module = infer_shapes(torch.fx.symbolic_trace(biased().eval()), X)
    FuseScaledDotProductAttention()(graph_module, expect=1)
    (added,) = [node for node in iter_nodes(graph_module.graph) if node.target is torch.add]
    assert added.prev in added.all_input_nodes


def test_three_masks_are_added_up_in_their_order() -> None:
    model = Attends(lambda q, k, x: None).eval()

    def weights(q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        one, two, three = (model.bias(each).permute(0, 2, 1).unsqueeze(2) for each in (x, x * 2, x * 3))
        return F.softmax(q @ k.transpose(2, 3) + one + two + three, dim=-1)

    model.weights = weights
    assert_rewrites(FuseScaledDotProductAttention(), model, X, count=1, others=[(LONGER,)], again=False)


def test_learned_masks_are_added_up_behind_the_inputs() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(2, 5, 5))

        def forward(self, q: Tensor, k: Tensor) -> Any:
            return torch.softmax(q @ k.mT + self.one + self.two, -1) @ k

    given = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    traced = torch.export.export(Learned(), given).module()
    expected = traced(*given)
    FuseScaledDotProductAttention()(traced, expect=1)
    operations = [node.op for node in iter_nodes(traced.graph) if node.op != "get_attr"]
    assert "placeholder" not in operations[operations.index("call_function") :]
    torch.testing.assert_close(traced(*given), expected)


def test_rows_of_the_smallest_number_are_fused_where_nothing_trains() -> None:
    fusing, model = FuseScaledDotProductAttention(), Attends(smallest_in_rows)
    assert_rewrites(fusing, model.eval(), X, count=1, others=[(LONGER,)], again=False, gradients=False)
    graph_module = infer_shapes(torch.fx.symbolic_trace(model.train()), X)
    fusing(graph_module, expect=0)
    assert [refusal.reason for refusal in history(graph_module)[-1].refusals] == ["training"]


def test_what_only_the_attention_used_goes_and_comes_back() -> None:
    torch.manual_seed(0)
    model = modular().eval()
    graph_module = infer_shapes(torch.fx.symbolic_trace(model), X)
    before = [(node.name, str(node.args)) for node in iter_nodes(graph_module.graph)]
    FuseScaledDotProductAttention()(graph_module, expect=1, strict=True)
    assert not {"softmax", "dropout"} & {name for name, _ in graph_module.named_modules()}
    (fused,) = [node for node in iter_nodes(graph_module.graph) if "attention" in node.name]
    assert fused.kwargs == {"scale": 0.5}
    assert not any(node.target in (torch.clone, torch.matmul, "transpose_3") for node in iter_nodes(graph_module.graph))
    torch.testing.assert_close(graph_module(X), model(X), rtol=0, atol=1e-5)
    undo(graph_module)
    assert [(node.name, str(node.args)) for node in iter_nodes(graph_module.graph)] == before
    restored: Any = graph_module
    assert (restored.softmax.dim, restored.dropout.p) == (-1, 0.1)


def _written(q: Tensor, k: Tensor, x: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1)
    setitem(q, (0, 0, 0), 1.0)
    return torch.softmax(scores, -1)


def _written_mask(q: Tensor, k: Tensor, x: Tensor) -> Tensor:
    mask = torch.where(x[:, None, :, :1] > 0, 0.0, 1.0)
    setitem(mask, 0, -math.inf)
    return torch.softmax(q @ k.transpose(-2, -1) + mask, -1)


def _written_sum(q: Tensor, k: Tensor, x: Tensor) -> Tensor:
    mask = torch.sigmoid(q @ k.transpose(-2, -1) * x.sum())
    return torch.softmax(mask.add_(q @ k.transpose(-2, -1)), -1)


def _positive(scores: Tensor) -> Tensor:
    return torch.where(scores > 0, 1.0, 0.0)


LEFT_ALONE: dict[str, tuple[str, Weights]] = {
    "scores that are read": ("several-users", lambda q, k, x: torch.softmax((s := q @ k.mT) + _positive(s), -1)),
    "a cap": ("", lambda q, k, x: torch.softmax(torch.tanh(q @ k.mT / 30.0) * 30.0, -1)),
    "a scale that is computed": ("", lambda q, k, x: torch.softmax(q @ k.mT * x.sum(), -1)),
    "another dimension": ("other-attention", lambda q, k, x: torch.softmax(q @ k.mT, -2)),
    "a number that hides little": (
        "other-attention",
        lambda q, k, x: torch.softmax((q @ k.mT).masked_fill(x[:, None, :, :1] > 0, -1e4), -1),
    ),
    "a scale after the mask": ("", lambda q, k, x: torch.softmax((q @ k.mT + x[:, :1, :1, None].clamp(0, 1)) * 2, -1)),
    "rows of -inf": (
        "masked-rows",
        lambda q, k, x: torch.softmax((q @ k.mT).masked_fill(x[:, None, :, :1] > 0, -math.inf), -1),
    ),
    "a causal mask of -inf": ("masked-rows", lambda q, k, x: causally(q, k, -math.inf)),
    "an unknown mask": ("masked-rows", lambda q, k, x: torch.softmax(q @ k.mT + x[:, None, :, :1], -1)),
    "two masks that add up to -inf": (
        "masked-rows",
        lambda q, k, x: torch.softmax(
            (q @ k.mT).masked_fill(x[:, None, :, :1] > 0, MIN) + torch.where(x[:, None, :, :1] > 0, MIN, 0.0), -1
        ),
    ),
    "queries that are written": ("mutated", _written),
    "a mask that is written": ("masked-rows", _written_mask),
    "a sum that is written to the mask": ("", _written_sum),
}


@pytest.mark.parametrize(("reason", "weights"), LEFT_ALONE.values(), ids=list(LEFT_ALONE))
def test_what_would_compute_something_else_is_left_alone(reason: str, weights: Weights) -> None:
    rewritten = assert_rewrites(FuseScaledDotProductAttention(), Attends(weights).eval(), X, count=0, gradients=False)
    assert [code for _, code in refused(rewritten)] == ([reason] if reason else [])


def test_unknown_shapes_active_dropout_and_half_precision_are_refused() -> None:
    half = infer_shapes(torch.fx.symbolic_trace(modular().eval().half()), X.half())
    active = infer_shapes(torch.fx.symbolic_trace(modular().train()), X)
    unshaped = torch.fx.symbolic_trace(modular().eval())
    for graph_module, reason in ((unshaped, "shape-unknown"), (active, "training"), (half, "unsupported-dtype")):
        FuseScaledDotProductAttention()(graph_module, expect=0)
        assert [code for _, code in refused(graph_module)] == [reason]


def test_weights_that_are_returned_stay() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(q @ k.mT, -1)
        return weights @ v, weights

    graph_module = infer_shapes(torch.fx.symbolic_trace(attention), X, X, X)
    FuseScaledDotProductAttention()(graph_module, expect=0)
    (refusal,) = history(graph_module)[-1].refusals
    assert (refusal.reason, "`output`" in refusal.message) == ("several-users", True)


def test_a_softmax_that_is_no_attention_is_not_mentioned() -> None:
    routed = Attends(lambda q, k, x: torch.softmax(torch.relu(q[..., :1] * k[..., :1].mT), -1)).eval()
    assert refused(assert_rewrites(FuseScaledDotProductAttention(), routed, X, count=0)) == []


test_conformance = conformance_tests(
    FuseScaledDotProductAttention(),
    models=[
        ModelCase("attention", modular, X),
        ModelCase("biased attention", biased, X, form="export-dynamic"),
        ModelCase("causal attention", lambda: Attends(lambda q, k, x: causally(q, k, MIN)), X, form="functions"),
    ],
)
