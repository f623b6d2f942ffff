"""The same sites are found on module, functional and export graphs of one model, by each of the five passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_arith import ChangeTrueDivToMulByInverse
from fxopt_capture import capture
from fxopt_core import Record, ReversibleTransformation, Transformation, faithful_copy, history, iter_nodes
from fxopt_linear import FuseBiasInLinear, MergeLinears
from fxopt_norm import FuseBatchNorm1dInLinear, FuseBatchNorm2dInConv2d
from fxopt_rewrite import infer_shapes


class Sites(nn.Module):
    """Sites for all five passes, and near misses for each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.branch, self.branch_norm = nn.Conv2d(6, 6, 3, padding="same", bias=False), nn.BatchNorm2d(6)
        self.used_twice, self.used_norm = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)
        self.dense, self.dense_norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.first_norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False)
        self.deep, self.deep_norm = nn.Linear(8, 8), nn.BatchNorm1d(2)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 4, bias=False), nn.Linear(8, 4)
        self.frozen = nn.Linear(8, 4)
        self.frozen.requires_grad_(False)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Call a linear layer as a module."""
        return getattr(self, name)(x)  # type: ignore[no-any-return]  # a module gives a tensor here

    def convolve(self, name: str, x: Tensor) -> Tensor:
        """Call a convolution as a module."""
        return getattr(self, name)(x)  # type: ignore[no-any-return]  # a module gives a tensor here

    def normalise(self, name: str, x: Tensor) -> Tensor:
        """Call a batch norm as a module."""
        return getattr(self, name)(x)  # type: ignore[no-any-return]  # a module gives a tensor here

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = F.relu(self.normalise("norm", self.convolve("conv", x)))
        x = x + self.normalise("branch_norm", self.convolve("branch", x))
        y = self.convolve("used_twice", x)
        x = (y + self.normalise("used_norm", y)).mean((2, 3)) / 7
        x = self.normalise("dense_norm", self.linear("dense", x))
        x = self.linear("last", self.normalise("first_norm", x)) / 2.0
        deep = self.normalise("deep_norm", self.linear("deep", torch.stack([x, x], 1)))
        q, k, v = self.linear("q", x), self.linear("k", x), self.linear("v", x)
        return deep * 1.0, q * 1.0, k + v, self.linear("frozen", x) * 1.0, (x / 3.0).floor()


class FunctionalSites(Sites):
    """The same, called as functions of parameters."""

    def linear(self, name: str, x: Tensor) -> Tensor:
        layer = getattr(self, name)
        return F.linear(x, layer.weight, layer.bias)

    def convolve(self, name: str, x: Tensor) -> Tensor:
        layer = getattr(self, name)
        return F.conv2d(x, layer.weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)

    def normalise(self, name: str, x: Tensor) -> Tensor:
        layer = getattr(self, name)
        return F.batch_norm(
            x, layer.running_mean, layer.running_var, layer.weight, layer.bias, False, layer.momentum, layer.eps
        )


def images() -> Tensor:
    """Return an input."""
    return torch.randn(3, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def prepared(cls: type[Sites]) -> Sites:
    """Return a model with statistics that matter, the same for each class."""
    torch.manual_seed(0)
    model = cls()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)  # type: ignore[arg-type]  # it tracks statistics
            nn.init.uniform_(module.running_var, 0.5, 2)  # type: ignore[arg-type]  # it tracks statistics
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return model.eval()


def traced(model: Sites) -> GraphModule:
    """Return a graph of modules or functions."""
    return infer_shapes(torch.fx.symbolic_trace(model), images())


def exported(model: Sites) -> GraphModule:
    """Return a graph of aten operators."""
    module = torch.export.export(model, (images(),), strict=False).module(check_guards=False)
    assert isinstance(module, GraphModule)
    return module


FORMS: dict[str, Callable[[], GraphModule]] = {
    "modules": lambda: traced(prepared(Sites)),
    "functions": lambda: traced(prepared(FunctionalSites)),
    "aten": lambda: exported(prepared(Sites)),
    "aten of functions": lambda: exported(prepared(FunctionalSites)),
    "captured": lambda: capture(prepared(Sites), (images(),)),
}


@cache
def _made(form: str) -> GraphModule:
    return FORMS[form]()


def made(form: str) -> GraphModule:
    """Return a graph of a form, a copy of one that is made once."""
    return faithful_copy(_made(form))


EXPECTED: dict[type[Transformation], list[set[str]]] = {
    MergeLinears: [{"q", "k", "v"}],
    FuseBiasInLinear: [{"dense"}, {"deep"}, {"q"}, {"v"}, {"frozen"}],
    FuseBatchNorm2dInConv2d: [{"conv", "norm"}, {"branch", "branch_norm"}],
    FuseBatchNorm1dInLinear: [{"dense", "dense_norm"}, {"first_norm", "last"}],
}
REFUSED = {
    MergeLinears: ["mixed-requires-grad"],
    FuseBiasInLinear: [],
    FuseBatchNorm2dInConv2d: ["several-users"],
    FuseBatchNorm1dInLinear: ["wrong-axis"],
    ChangeTrueDivToMulByInverse: ["rounded-quotient"],
}


def sites(record: Record) -> list[set[str]]:
    """Return the names in each site that was rewritten."""
    return [set(rewrite.site.replace(" + ", " ").split()) for rewrite in record.rewrites]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own copy of an export graph
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cls", [*EXPECTED, ChangeTrueDivToMulByInverse])
def test_the_same_sites_are_found_on_every_form(cls: type[Transformation], form: str) -> None:
    graph_module = made(form)
    expected = graph_module(images())
    names = [node.name for node in iter_nodes(graph_module.graph)]
    transformation = cls()
    transformation(graph_module)
    record = history(graph_module)[-1]
    if cls in EXPECTED:
        assert sites(record) == EXPECTED[cls]
    else:
        assert len(record.rewrites) == 2
    assert [refusal.reason for refusal in record.refusals] == REFUSED[cls]
    for found, original in zip(graph_module(images()), expected, strict=True):
        torch.testing.assert_close(found, original, rtol=1e-4, atol=1e-4)
    if isinstance(transformation, ReversibleTransformation):
        transformation(graph_module, reverse=True)
        assert [node.name for node in iter_nodes(graph_module.graph)] == names
        assert all(torch.equal(a, b) for a, b in zip(graph_module(images()), expected, strict=True))
