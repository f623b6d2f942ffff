"""Equal passes in one composition: each takes back its own edits, and nothing else."""

from __future__ import annotations

import pytest
import torch
from site_passes import Computes
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import Instrument, PassRun, compose, history, instrumented
from fxopt_linear import FuseBiasInLinear, MergeLinears

BIAS, MERGE = FuseBiasInLinear(), MergeLinears()


class Declining(Instrument):
    """Declines the pass at one place."""

    def __init__(self, place: int) -> None:
        self.place = place

    def should_run(self, run: PassRun, graph_module: GraphModule) -> bool:
        return run.index != self.place


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("declined", [None, 0, 2])
@pytest.mark.parametrize("passes", [(BIAS, MERGE, BIAS), (BIAS, BIAS), (MERGE, BIAS, MERGE)])
def test_reversing_brings_everything_back(
    passes: tuple[FuseBiasInLinear | MergeLinears, ...], declined: int | None, times: int
) -> None:
    graph_module = symbolic_trace(Computes(lambda m, x: m.q(x) + m.k(x), q=nn.Linear(4, 4), k=nn.Linear(4, 4)))
    before, x = graph_module.state_dict(), torch.randn(2, 4)
    expected, transformation = graph_module(x), compose(*passes)
    for _ in range(times):
        with instrumented(Declining(-1 if declined is None else declined)):
            transformation(graph_module)
    transformation(graph_module, reverse=True)
    assert list(graph_module.state_dict()) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in graph_module.state_dict().items())
    assert torch.equal(graph_module(x), expected)
    assert not transformation.get_transformed_nodes(graph_module)
    assert {record.state for record in history(graph_module) if record.changed} == {"undone"}
