"""The passes of the family together: what the kit asks of each, drawn models, and models of the field."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from simplify_models import TOKENS, Adapted, Attends, Masked, Product, Repeats, Rotary, X
from site_passes import Called
from torch import Tensor, nn

from fxopt_core import history, iter_nodes, registry, undo
from fxopt_simplify import ShapeTables
from fxopt_testing import ModelCase, conformance_tests, zoo
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import graph_of, structure

FORMS: tuple[Form, ...] = ("modules", "functions", "export-dynamic")
_OWN = [
    ModelCase("masked", Masked, TOKENS, form="export-dynamic"),
    ModelCase("causal", lambda: Masked(causal=True), TOKENS, form="functions"),
    ModelCase("rotary", Rotary, X),
    ModelCase("repeats", Repeats, X),
    ModelCase("repeats", Repeats, X, form="export-dynamic"),
    ModelCase("attends", Attends, X, form="export-dynamic"),
    ModelCase("product", lambda: Product(4, 3), X),
    ModelCase("adapted", lambda: Adapted().eval(), torch.randn(3, 8)),
    ModelCase("activates", lambda: Called(lambda x: x * torch.sigmoid(x)), X),
]
_NAMES = (
    "repeated",
    "views",
    "in-place operations",
    "by size",
    "unused result",
    "called twice",
    "dropout",
    "structured",
)

test_conformance = conformance_tests("fxopt-simplify", models=[*_OWN, *(case for case in zoo() if case.name in _NAMES)])

Step = Callable[[Tensor], Tensor]
_STEPS: list[Step] = [
    lambda x: x[:],
    lambda x: x.transpose(0, 1).transpose(0, 1),
    lambda x: x.unsqueeze(1).squeeze(1),
    lambda x: x.reshape(x.shape),
    lambda x: x.expand(-1, -1),
    lambda x: x.to(torch.float64).to(torch.float64).to(torch.float32),
    lambda x: x * 1,
    lambda x: x - 0.0,
    lambda x: x + 0.0,
    lambda x: x.clone(),
    lambda x: x.clone().mul_(2.0),
    lambda x: x.contiguous().contiguous(),
    lambda x: x.sin() + x.sin(),
    lambda x: x.relu() * x.relu().abs(),
    lambda x: x + torch.arange(x.shape[1]).to(torch.float32) * 0.5,
    lambda x: x + torch.arange(x.shape[0]).unsqueeze(1).float(),
    lambda x: x.masked_fill(torch.arange(x.shape[0])[:, None] < torch.arange(x.shape[1])[None, :], 0.5),
    lambda x: torch.where(torch.arange(x.shape[0])[:, None] >= 0, x, x.exp()),
    lambda x: F.dropout(x, 0.5, False),
    lambda x: x + torch.ones_like(x) * 2.0,
    lambda x: (x, x.exp().sum())[0],
]


class Drawn(nn.Module):
    """A chain of drawn steps, some results of which are returned."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.steps = [draw.choice(_STEPS) for _ in range(draw.randint(1, 9))]
        self.returned = draw.randint(0, len(self.steps))
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        values = [self.fc(x)]
        for step in self.steps:
            values.append(step(values[-1]))
        return values[-1], values[self.returned]


@pytest.mark.parametrize("seed", range(8))
def test_drawn_models_compute_the_same_and_come_back(seed: int) -> None:
    """At the size of the example and at others; the second call takes what the first one has kept."""
    torch.manual_seed(seed)
    graph_module = graph_of(Drawn(seed), "modules", X)
    given = [X, X[:2].clone(), torch.cat([X, X]), X]
    expected = [graph_module(x.clone()) for x in given]
    before, code = structure(graph_module), graph_module.code
    registry().pipeline("simplify")(graph_module)
    for x, wanted in zip(given, expected, strict=True):
        for one, other in zip(graph_module(x.clone()), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=0.0, equal_nan=True)
    once = graph_module.code
    registry().pipeline("simplify")(graph_module)
    assert graph_module.code == once
    while any(record.state == "applied" and record.changed for record in history(graph_module)):
        undo(graph_module)
    assert graph_module.code == code
    assert structure(graph_module) == before


@pytest.mark.parametrize("form", FORMS)
def test_an_encoder_loses_what_its_mask_cost(form: Form) -> None:
    """In an export, the absent mask is known to mask nothing; in the other forms, it is kept for each size."""
    pipeline = registry().pipeline("simplify")
    graph_module = graph_of(Masked().eval(), form, TOKENS)
    before = len(graph_module.graph.nodes)
    expected = {rows: graph_module(TOKENS[:rows]) for rows in (1, 2)}
    pipeline(graph_module)
    for rows, wanted in expected.items():
        torch.testing.assert_close(graph_module(TOKENS[:rows]), wanted)
    assert before - len(graph_module.graph.nodes) >= 5
    names = [str(node.target) for node in iter_nodes(graph_module.graph)]
    assert not [name for name in names if "ones" in name or "arange" in name]
    if form == "export-dynamic":
        (attention,) = [node for node in iter_nodes(graph_module.graph) if "scaled_dot" in str(node.target)]
        assert len(attention.all_input_nodes) == 3


def test_merging_finds_the_same_layers_afterwards() -> None:
    pytest.importorskip("fxopt_linear")
    sites = []
    for text in ("merge-linears", "simplify,merge-linears"):
        graph_module = registry().pipeline(text)(graph_of(Masked().eval(), "export-dynamic", TOKENS))
        sites.append([rewrite.site for rewrite in history(graph_module)[-1].rewrites])
    assert sites[0] == sites[1] != []


def test_ten_thousand_nodes_take_seconds() -> None:
    """Each pass is linear: chains of no-ops, and a value with thousands of readers."""

    def deep(x: Tensor) -> Tensor:
        total, y = x, x.relu()
        for _ in range(1500):
            y = y[:].abs()
            total = total + y * x.relu() + torch.arange(x.shape[0]).unsqueeze(1)
        return total

    graph_module = torch.fx.symbolic_trace(deep)
    assert len(graph_module.graph.nodes) > 10_000
    steps = registry().pipeline("simplify")
    steps(graph_module)
    assert sum(record.seconds for record in history(graph_module)) < 20
    assert sum(isinstance(module, ShapeTables) for module in graph_module.modules()) == 1
    torch.testing.assert_close(graph_module(X), deep(X))
