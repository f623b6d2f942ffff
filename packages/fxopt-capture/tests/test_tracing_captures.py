"""A captured module is a graph already: tracers of torch.fx are told to take it as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxopt_capture import capture
from fxopt_core import CaptureError


class Whole(torch.fx.Tracer):
    """Leaves all modules whole."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def test_it_is_not_traced_again_and_stands_in_graphs_as_a_whole() -> None:
    x = torch.randn(3, 4)
    captured = capture(nn.Linear(4, 2).eval(), x)
    for model in (captured, nn.Sequential(captured)):
        with pytest.raises(CaptureError, match=r"is a graph already, .*let the tracer leave it whole"):
            torch.fx.symbolic_trace(model)
    model = nn.Sequential(captured, nn.ReLU())
    traced = torch.fx.GraphModule(model, Whole().trace(model))
    torch.testing.assert_close(traced(x), model(x))
