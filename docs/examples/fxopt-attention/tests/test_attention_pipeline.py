"""The passes together, with those of other distributions, as the registry offers them."""

from __future__ import annotations

import torch
from torch import nn

import fxopt_attention.plugin
from fxopt_core import PipelinesPlugin, TransformationsPlugin, history, registry

PLUGIN: tuple[TransformationsPlugin, PipelinesPlugin] = (fxopt_attention.plugin, fxopt_attention.plugin)


class Attention(nn.Module):
    """As it stands in most models: scaled queries, and dropout behind the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (self.query(x) / 2.5) @ self.key(x).transpose(-1, -2)
        y: torch.Tensor = self.dropout(scores.softmax(-1)) @ self.value(x)
        return y


def test_the_registry_names_this_distribution() -> None:
    assert "attention" not in registry().failed
    for name, reversible in {"remove-dropout": True, "fold-query-scale": False, "fuse-query-scale": True}.items():
        info = registry().available()[name]
        found = (info.family, info.distribution, info.version, info.reversible)
        assert found == ("attention", "fxopt-attention", "0.1.0", reversible)


def test_the_pipeline() -> None:
    model, x = Attention().eval(), torch.randn(2, 5, 8)
    graph_module = registry().pipeline("attention")(torch.fx.symbolic_trace(model))
    torch.testing.assert_close(graph_module(x), model(x))
    assert [(record.pass_name, len(record.rewrites)) for record in history(graph_module)] == [
        ("remove-dropout", 1),
        ("change-true-div-to-mul-by-inverse", 1),
        ("fold-query-scale", 1),
        ("merge-linears", 1),
    ]
    assert [name for name, _ in graph_module.named_children()] == ["query_scaled_key_value_merged"]


def test_options_by_text() -> None:
    text = 'remove-dropout{where="block.*"},fold-query-scale'
    assert registry().pipeline_text(registry().pipeline(text)) == text
