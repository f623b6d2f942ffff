"""A model that is a single layer is captured, too: its call stays an operator, since no node can call the root."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxopt_capture import capture, symbolic_trace


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Linear(4, 2), torch.randn(3, 4)),
        (nn.Conv2d(3, 2, 3), torch.randn(2, 3, 5, 5)),
        (nn.ReLU(), torch.ones(2, 2)),
    ],
)
def test_a_single_layer(model: nn.Module, x: Tensor) -> None:
    for graph_module in (capture(model, (x,)), symbolic_trace(model, example_inputs=(x,))):
        assert torch.equal(graph_module(x), model(x))
        assert list(graph_module.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("kind", ["list", "dict", "nested"])
def test_graph_modules_return_plain_lists_and_dictionaries(kind: str) -> None:
    class Several(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"list": [x + 1, x], "dict": {"b": x + 1, "a": x}, "nested": ({"a": [x + 1, (x, x)]}, x)}[kind]

    traced = torch.fx.symbolic_trace(Several())
    captured, x = capture(traced, torch.randn(2, 3)), torch.randn(4, 3)
    found, expected = captured(x), Several()(x)
    assert pytree.tree_structure(found) == pytree.tree_structure(expected)
    torch.testing.assert_close(found, expected)
