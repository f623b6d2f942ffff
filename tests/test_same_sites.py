"""The same sites are found on module, functional and export graphs of one model, by each of the five passes."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from architectures import randomise_statistics
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_arith import ChangeTrueDivToMulByInverse
from fxopt_core import Record, ReversibleTransformation, Transformation, faithful_copy, history, iter_nodes
from fxopt_linear import FuseBiasInLinear, MergeLinears
from fxopt_norm import FuseBatchNorm1dInLinear, FuseBatchNorm2dInConv2d
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import graph_of


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

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = F.relu(self.norm(self.conv(x)))
        x = x + self.branch_norm(self.branch(x))
        y = self.used_twice(x)
        x = (y + self.used_norm(y)).mean((2, 3)) / 7
        x = self.dense_norm(self.dense(x))
        x = self.last(self.first_norm(x)) / 2.0
        deep = self.deep_norm(self.deep(torch.stack([x, x], 1)))
        q, k, v = self.q(x), self.k(x), self.v(x)
        return deep * 1.0, q * 1.0, k + v, self.frozen(x) * 1.0, (x / 3.0).floor()


def images() -> Tensor:
    """Return an input."""
    return torch.randn(3, 3, 6, 6, generator=torch.Generator().manual_seed(0))


FORMS: tuple[Form, ...] = ("modules", "functions", "export", "capture")


@cache
def _made(form: Form) -> GraphModule:
    torch.manual_seed(0)
    return graph_of(randomise_statistics(Sites()).eval(), form, images())


def made(form: Form) -> GraphModule:
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
def test_the_same_sites_are_found_on_every_form(cls: type[Transformation], form: Form) -> None:
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
