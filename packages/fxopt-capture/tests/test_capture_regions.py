"""Regions under contexts that stay one call of the graph: right, with the model's keys, and said."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from fxopt_capture import capture


class Regions(nn.Module):
    """Runs layers under contexts."""

    def __init__(self, *, gradients: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.gradients = gradients

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.gradients):
            y = self.first(x)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not self.gradients):
            z = self.second(x)
        return torch.add(y + z, self.third(x))


@pytest.mark.parametrize("gradients", [True, False])
def test_regions_are_right_and_said(gradients: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = Regions(gradients=gradients).eval()
    with caplog.at_level(logging.WARNING, "fxopt_capture"):
        captured = capture(model, torch.randn(2, 4))
    x = torch.randn(5, 4)
    assert torch.equal(captured(x), model(x))
    assert list(captured.state_dict()) == list(model.state_dict())
    assert "Regions: " in caplog.text
    assert "(torch.autocast: second.weight, second.bias)" in caplog.text
    assert ("(torch.no_grad or enable_grad: first.weight, first.bias)" in caplog.text) is not gradients
    expected = "are regions" if not gradients else "is a region"
    assert f"of the graph's calls {expected} of the model in which passes see no layers" in caplog.text


class Constant(nn.Module):
    """Computes positions without gradients, into which none could flow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            positions = torch.arange(x.size(0)).float()
        return torch.mul(self.layer(x), positions[:, None])


def test_regions_that_hide_nothing_are_not_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxopt_capture"):
        captured = capture(Constant().eval(), torch.randn(2, 4))
    assert not [record for record in caplog.records if record.name == "fxopt_capture"]
    assert not any("wrap_with" in str(node.target) for node in captured.graph.nodes)
