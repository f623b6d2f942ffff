"""What the registry gets from this family."""

from __future__ import annotations

import torch
from norm_models import chain
from torch import nn

from fxopt_core import Transformation, history, registry
from fxopt_norm import plugin
from fxopt_rewrite import infer_shapes


def test_the_pipeline_runs_all_folds() -> None:
    model = chain(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 4, 2), nn.BatchNorm2d(4), nn.Flatten(2),
        nn.Conv1d(4, 2, 1), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(2 * 49, 3), nn.BatchNorm1d(3),
    )  # fmt: skip
    x = torch.randn(2, 3, 8, 8)
    pipeline: Transformation = registry().pipeline(plugin.fxopt_pipelines()["fold-batch-norm"])
    graph_module = infer_shapes(torch.fx.symbolic_trace(model), x)
    pipeline(graph_module, expect=4)
    assert not any("Norm" in type(module).__name__ for module in graph_module.modules())
    torch.testing.assert_close(graph_module(x), model(x), rtol=1e-4, atol=1e-4)
    assert sum(len(record.rewrites) for record in history(graph_module)) == 4
    assert registry().pipeline("fold-batch-norm") == pipeline
