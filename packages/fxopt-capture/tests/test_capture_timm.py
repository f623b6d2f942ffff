"""Convolutional models of other libraries: timm, and one with layers of its own."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from test_capture_transformers import layers
from torch import nn
from torch.fx import GraphModule

from fxopt_capture import capture
from fxopt_core.errors import CaptureError


def check(model: nn.Module, captured: GraphModule, shape: tuple[int, ...]) -> None:
    assert list(captured.state_dict()) == list(model.state_dict())
    for batch in (1, 3):
        x = torch.randn(batch, *shape)
        with torch.no_grad():
            torch.testing.assert_close(captured(x), model(x), rtol=1e-6, atol=1e-6)


# Layers called by the graph. timm has layer norms, and batch norms with an activation, of its own classes: operators.
def test_timm(timm: ModuleType) -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_vit", pretrained=False, num_classes=10, depth=1).eval()
    size = model.default_cfg["input_size"]
    captured = capture(model, torch.randn(2, *size))
    assert layers(captured) == {"Conv2d": 1, "Linear": 5}
    check(model, captured, size)


@pytest.mark.nightly
def test_sizes_that_take_for_ever_to_simplify_are_fixed(
    timm: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fxopt_capture.exporting.budget.FLOOR", 1.0)
    model = timm.create_model("davit_tiny", depths=(1, 1, 1, 1), num_classes=10).eval()
    with caplog.at_level("WARNING", "fxopt_capture"):
        captured = capture(model, torch.randn(2, 3, 64, 64))
    assert "s on expressions of sizes that vary, so that" in caplog.text
    with pytest.raises(CaptureError, match=r"has size 96 in dimension 2.*`dynamic_shapes` that allow it"):
        captured(torch.randn(2, 3, 96, 64))
    check(model, captured, (3, 64, 64))
