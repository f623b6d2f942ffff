"""Batch norms that the model writes out, of buffers: ``FrozenBatchNorm2d`` and its like."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from norm_models import Computes
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Tracer

from fxopt_norm import FuseBatchNorm1dInLinear, FuseBatchNorm2dInConv2d
from fxopt_rewrite import infer_shapes
from fxopt_testing.rewrites import graph_of, refusals, refused

IMAGES = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
Formula = Callable[["Frozen", Tensor], Tensor]


class Frozen(nn.Module):
    """Buffers of a batch norm, and what computes it."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, formula: Formula, features: int = 4) -> None:
        super().__init__()
        self.formula = formula
        for name, low in (("weight", 0.5), ("bias", -1.0), ("running_mean", -1.0), ("running_var", 0.5)):
            self.register_buffer(name, torch.empty(features).uniform_(low, 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self, x)


def detr(self: Frozen, x: Tensor) -> Tensor:
    weight, bias, mean, var = (
        each.reshape(1, -1, 1, 1) for each in (self.weight, self.bias, self.running_mean, self.running_var)
    )
    scale = weight * (var + 1e-5).rsqrt()
    return x * scale + (bias - mean * scale)


def detectron(self: Frozen, x: Tensor) -> Tensor:
    scale = self.weight * torch.rsqrt(1e-3 + self.running_var)
    shift = self.bias - scale * self.running_mean
    return shift.view(-1, 1, 1).to(torch.float32) + scale.view(-1, 1, 1).to(torch.float32) * x


def quotient(self: Frozen, x: Tensor) -> Tensor:
    scale = self.weight / torch.sqrt(self.running_var + 1e-5)
    shift = self.bias - self.running_mean * (self.weight / torch.sqrt(self.running_var + 1e-5))
    return x * scale[None, :, None, None] + shift[None, :, None, None]


def wrong_scale(self: Frozen, x: Tensor) -> Tensor:
    scale = (self.weight * (self.running_var + 1e-5).rsqrt()).view(-1, 1, 1)
    return x * scale + (self.bias.view(-1, 1, 1) - self.running_mean.view(-1, 1, 1) * scale * scale)


def last_axis(self: Frozen, x: Tensor) -> Tensor:
    scale = self.weight * (self.running_var + 1e-5).rsqrt()
    return x * scale + (self.bias - self.running_mean * scale)


def several_users(self: Frozen, x: Tensor) -> Tensor:
    scale = (self.weight * (self.running_var + 1e-5).rsqrt()).view(-1, 1, 1)
    return (x * scale + (self.bias.view(-1, 1, 1) - self.running_mean.view(-1, 1, 1) * scale)) * scale


def behind_conv(formula: Formula) -> nn.Module:
    return Computes(
        lambda self, x: self.norm(self.conv(x)).relu(), conv=nn.Conv2d(3, 4, 3, bias=False), norm=Frozen(formula)
    )


def fold(model: nn.Module, dtype: torch.dtype = torch.float32) -> GraphModule:
    return FuseBatchNorm2dInConv2d()(graph_of(model, "capture", IMAGES.to(dtype)))


@pytest.mark.parametrize("formula", [detr, detectron, quotient])
def test_folds(formula: Formula) -> None:
    model = behind_conv(formula)
    folded = fold(model)
    assert [str(node.target) for node in folded.graph.nodes if node.op == "call_module"][-1] == "conv_folded"
    assert not [node for node in folded.graph.nodes if "mul" in node.name or "add" in node.name]
    assert {*folded.state_dict()} == {"conv_folded.weight", "conv_folded.bias"}
    torch.testing.assert_close(folded(IMAGES), model(IMAGES), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-2), (torch.bfloat16, 6e-2)])
def test_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    model = behind_conv(detr).to(dtype)
    folded = fold(model, dtype)
    found = folded(IMAGES.to(dtype))
    assert not refusals(folded) and found.dtype == dtype
    torch.testing.assert_close(found.float(), model.float()(IMAGES), rtol=tolerance, atol=tolerance)


def test_traced_with_buffers_as_nodes() -> None:
    class WithBuffers(Tracer):
        proxy_buffer_attributes = True

    model = behind_conv(detr)
    graph: Graph = WithBuffers().trace(model)
    folded = FuseBatchNorm2dInConv2d()(infer_shapes(GraphModule(model, graph), IMAGES))
    assert [node.name for node in folded.graph.nodes] == ["x", "conv_folded", "relu", "output"]
    torch.testing.assert_close(folded(IMAGES), model(IMAGES), rtol=1e-5, atol=1e-5)


def test_behind_a_linear_layer() -> None:
    model = Computes(lambda self, x: self.norm(self.fc(x)), fc=nn.Linear(3, 4), norm=Frozen(last_axis))
    rows = torch.randn(5, 3)
    folded = FuseBatchNorm1dInLinear()(graph_of(model, "capture", rows))
    assert not refusals(folded) and "fc_folded" in dict(folded.named_modules())
    torch.testing.assert_close(folded(rows), model(rows), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("formula", "reason"),
    [(wrong_scale, "computed-weight"), (last_axis, "wrong-axis"), (several_users, "several-users")],
)
def test_refusals(formula: Formula, reason: str) -> None:
    model = behind_conv(formula)
    folded = fold(model)
    assert [found for _, found in refused(folded)] == [reason]


def test_refuses_another_dtype() -> None:
    """The product of halves and floats is float, that of the folded layer were half."""
    model = behind_conv(detr)
    model.get_submodule("conv").half()
    assert [reason for _, reason in refused(fold(model, torch.float16))] == ["dtype-mismatch"]


def test_refuses_a_second_call_of_the_norm() -> None:
    model = Computes(lambda self, x: self.norm(self.conv(x)) + self.norm(x), conv=nn.Conv2d(4, 4, 1), norm=Frozen(detr))
    folded = FuseBatchNorm2dInConv2d()(graph_of(model, "capture", torch.randn(2, 4, 6, 6)))
    assert [reason for _, reason in refused(folded)] == ["tied-parameter"]
