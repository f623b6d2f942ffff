"""State in plain attributes: every run starts from the same, and none is left behind."""

from __future__ import annotations

from typing import Any

import torch
from test_kept import Counts
from torch import nn
from torch.fx import Tracer

from fxopt_tools import verify

X = torch.linspace(-2, 2, 12).reshape(3, 4)


class CountsTracer(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Counts)


def test_a_layer_that_both_modules_share_starts_from_the_same_in_each_run() -> None:
    model = nn.Sequential(Counts(), nn.ReLU())
    traced = torch.fx.GraphModule(model, CountsTracer().trace(model))
    counts: Any = model[0]
    total = counts.total
    assert any(module is counts for module in traced.modules())
    report = verify(model, traced, [X, X])
    assert report, str(report)
    assert (counts.calls, counts.seen) == (0, []) and counts.total is total and total.item() == 0
