"""Linear layers that models write as products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from site_passes import Computes
from torch import Tensor, nn

from fxopt_core import history, undo
from fxopt_rewrite import GraphIndex, LinearCall, infer_shapes, read_linear
from fxopt_simplify import FuseProducts

Write = Callable[[Tensor, Tensor, Tensor], Tensor]
WAYS: dict[str, Write] = {
    "T": lambda x, w, b: x @ w.T + b,
    "bias first": lambda x, w, b: b + torch.matmul(x, w.t()),
    "mT": lambda x, w, b: x @ w.mT + b,
    "adjoint": lambda x, w, b: x @ w.adjoint() + b,
    "transpose": lambda x, w, b: x.matmul(w.transpose(0, 1)) + b,
    "transpose backwards": lambda x, w, b: x.matmul(w.transpose(-1, -2)) + b,
    "swapaxes": lambda x, w, b: x @ w.swapaxes(1, 0) + b,
    "permute": lambda x, w, b: x @ w.permute(1, 0) + b,
    "mm": lambda x, w, b: torch.mm(x, w.t()) + b,
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
    "inner": lambda x, w, b: torch.inner(x, w) + b,
    "linear": lambda x, w, b: F.linear(x, w) + b,
    "no bias": lambda x, w, b: x @ w.T,
}


def written_by(write: Write, *bias: int) -> Computes:
    weight, summand = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(*bias or (6,)))
    return Computes(lambda m, x: write(x, m.weight, m.bias).relu(), weight=weight, bias=summand)


@pytest.mark.parametrize("form", ["trace", "export"])
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_write_a_linear_layer(way: str, form: str) -> None:
    model, x = written_by(WAYS[way]).eval(), torch.randn(3, 8)
    before = torch.export.export(model, (x,)).module() if form == "export" else torch.fx.symbolic_trace(model)
    assert isinstance(before, torch.fx.GraphModule)
    infer_shapes(before, x)
    names = [node.name for node in before.graph.nodes]
    fused = FuseProducts()(before, expect=1)
    index = GraphIndex(fused)
    (call,) = [found for node in index.nodes if isinstance(found := read_linear(index, node), LinearCall)]
    assert (call.bias is None) == (way == "no bias") and call.in_features == 8 and not call.transposed
    assert "val" in call.node.meta
    torch.testing.assert_close(fused(x), model(x))
    if form == "trace":
        torch.testing.assert_close(fused(x[:0]), model(x[:0]))
    fused(x).sum().backward()
    assert model.weight.grad is not None
    assert [node.name for node in undo(fused).graph.nodes] == names


@pytest.mark.parametrize(
    ("write", "bias", "sites"),
    [
        (lambda x, w, b: torch.addmm(b, x, w.t(), alpha=2), (6,), 0),
        (lambda x, w, b: torch.addmm(b, x, w.t()), (3, 6), 0),
        (lambda x, w, b: x[:, :6] @ w + 1, (6,), 0),  # read as it is
        (lambda x, w, b: x @ w.transpose(0, 0).T + b, (6,), 0),
        (lambda x, w, b: F.linear(x, w, b), (6,), 0),
        (lambda x, w, b: (x @ w.T).add(b, alpha=2), (6,), 1),
        (lambda x, w, b: x @ w.T + b, (3, 6), 1),
        (lambda x, w, b: (p := x @ w.T) * (p + b), (6,), 1),
        (lambda x, w, b: (x @ w.T).add_(b), (6,), 1),
    ],
)
def test_what_is_no_layer_stays_and_biases_of_other_shapes_are_added_as_before(
    write: Write, bias: tuple[int, ...], sites: int
) -> None:
    model, x = written_by(write, *bias).eval(), torch.randn(3, 8)
    fused = FuseProducts()(infer_shapes(torch.fx.symbolic_trace(model), x), expect=sites)
    torch.testing.assert_close(fused(x), model(x))
    index = GraphIndex(fused)
    calls = [found for node in index.nodes if isinstance(found := read_linear(index, node), LinearCall)]
    assert not sites or calls[0].bias is None


def test_what_is_refused() -> None:
    model, x = written_by(WAYS["T"]).eval(), torch.randn(3, 8)
    (refusal,) = history(FuseProducts()(torch.fx.symbolic_trace(model)))[-1].refusals
    assert refusal.reason == "shape-unknown" and "infer_shapes" in refusal.message
    model.bias.data = model.bias.data.double()
    (refusal,) = history(FuseProducts()(infer_shapes(torch.fx.symbolic_trace(model), x)))[-1].refusals
    assert refusal.reason == "dtype-mismatch" and "`bias` torch.float64" in refusal.message

    def written(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        product = x @ w.T
        x.mul_(2)
        return product + b

    traced = torch.fx.symbolic_trace(written_by(written).eval())
    (refusal,) = history(FuseProducts()(infer_shapes(traced, x)))[-1].refusals
    assert refusal.reason == "mutated" and "`x` is written in place" in refusal.message
