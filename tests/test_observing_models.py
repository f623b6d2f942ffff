"""The instruments together on captured models: what they say is true, and undoing is watched as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt_capture import capture
from fxopt_core import compose, history, instrumented, iter_nodes, undo
from fxopt_linear import MergeLinears
from fxopt_norm import FuseBatchNorm2dInConv2d
from fxopt_tools import Dumps, Inputs, Verify


class Attention(nn.Module):
    """Grouped queries: three projections of unequal size."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.out = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x).unflatten(-1, (2, 8)), self.k(x), self.v(x)
        scores = torch.softmax(q @ k.unsqueeze(-1) / 8.0, -2)
        attended: Tensor = self.out((scores * v.unsqueeze(-2)).sum(-2))
        return attended + x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.layers = nn.ModuleList(Attention() for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.norm(self.conv(x)).relu().flatten(2).transpose(1, 2)
        for layer in self.layers:
            y = layer(y)
        return {"states": y, "best": y.mean(1).argmax(-1)}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = Model().eval()
        norm = found.norm
        with torch.no_grad():
            for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
                tensor.uniform_(0.5, 1.5)  # type: ignore[union-attr]  # the statistics are there
    return found


def test_all_that_is_said_agrees(model: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    graph_module: Any = capture(model, (x,))
    gate = Verify([x, Inputs(x[:1].repeat(4, 1, 1, 1))], original=model)
    with instrumented(dumps := Dumps(tmp_path / "dumps"), gate):
        compose(FuseBatchNorm2dInConv2d(), MergeLinears())(graph_module)
    records = history(graph_module)
    assert tuple(len(record.rewrites) for record in records) == (1, 3)
    assert [check.passed for check in gate.checks] == [True, True]
    assert all(len(check.report.outputs) == 4 for check in gate.checks if check.report)
    names = [f"{record.pass_name}.{side}.txt" for record in records for side in ("before", "after")]
    assert [file.name[4:] for file in dumps.files] == names
    last = dumps.files[-1].read_text(encoding="utf-8")
    assert all(str(node.format_node()) in last for node in iter_nodes(graph_module.graph) if node.op != "output")


def test_undoing_is_watched_too(model: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    graph_module = capture(model, (x,))
    keys = list(graph_module.state_dict())
    compose(MergeLinears(where="layers.0.*"), MergeLinears(where="layers.[12].*"))(graph_module)
    gate = Verify(x, original=model)
    with instrumented(dumps := Dumps(tmp_path / "dumps"), gate):
        undo(graph_module)
    assert list(graph_module.state_dict()) == keys
    assert [(check.index, check.reverse, check.passed) for check in gate.checks] == [(1, True, True), (0, True, True)]
    names = [f"{index}_undo-merge-linears.{side}.txt" for index in ("000", "001") for side in ("before", "after")]
    assert [file.name for file in dumps.files] == names
    before, after = (file.read_text(encoding="utf-8") for file in dumps.files[:2])
    assert before != after
