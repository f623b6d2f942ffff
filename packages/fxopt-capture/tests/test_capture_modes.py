"""Training and evaluation mode of a captured graph module."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt_capture import capture
from fxopt_capture.exporting.modes import captured_mode
from fxopt_core.errors import CaptureError


class Scaled(nn.Module):
    """Asks for the mode in a property."""

    @property
    def factor(self) -> float:
        return 2.0 if self.training else 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Nested(nn.Module):
    """Asks for the mode within a function of its own."""

    def forward(self, x: Tensor) -> Any:
        return (lambda y: y + 1 if self.training else y)(x)


class Tables(nn.Module):
    """Keeps a table from its first call: in an attribute, a buffer or a dictionary."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.lin, self.place = nn.Linear(4, 4), place
        self.kept: dict[int, Tensor] = {}
        self.register_buffer("buffer", None, persistent=False)
        self.attribute: Any = None

    def forward(self, x: Tensor) -> Any:
        if self.place == "dictionary":
            if 4 not in self.kept:
                self.kept[4] = torch.arange(4.0)
            table: Tensor = self.kept[4]
        else:
            if getattr(self, self.place) is None:
                setattr(self, self.place, torch.arange(4.0))
            table = getattr(self, self.place)
        return self.lin(x) * table


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("place", ["attribute", "buffer", "dictionary"])
def test_tables_of_calls_in_inference_mode(place: str, within: bool) -> None:
    model = Tables(place).eval()
    with torch.inference_mode():
        x = torch.randn(2, 4)
        model(x)
    with torch.inference_mode(within), torch.no_grad():
        captured = capture(model, x)
        assert torch.equal(captured(x), model(x))
    if place != "buffer":  # the model's own buffers are those of the graph, and autograd takes none of them
        captured(torch.randn(2, 4)).sum().backward()
        assert model.lin.weight.grad is not None


@pytest.mark.parametrize("made_within", [False, True])
def test_examples_of_one_image_in_inference_mode(made_within: bool) -> None:
    """A batch of 1 is captured by one of 2, which is made on the way."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    with torch.inference_mode(made_within):
        x = torch.randn(1, 3, 8, 8)
    with torch.inference_mode():
        captured = capture(model, x)
        assert torch.equal(captured(x), model(x))
    other = torch.randn(3, 3, 9, 10)
    assert torch.equal(captured(other), model(other)) and captured(other).requires_grad


@pytest.mark.parametrize(
    ("model", "matters"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2), nn.Conv2d(1, 1, 1)), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout()), True),
        (nn.BatchNorm1d(2), True),
        (nn.MultiheadAttention(4, 2), True),
        (nn.LSTM(2, 2), True),
        (Scaled(), True),
        (Nested(), True),
    ],
)
@pytest.mark.parametrize("mode", [True, False])
def test_whether_the_mode_matters(model: nn.Module, matters: bool, mode: bool) -> None:
    assert captured_mode(model.train(mode)) is (mode if matters else None)


@pytest.mark.parametrize(("mode", "other"), [(True, "evaluation"), (False, "training")])
def test_the_mode_of_the_capture_can_be_set_again_and_the_other_one_is_refused(mode: bool, other: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).train(mode)
    captured = capture(model, torch.randn(3, 4))
    assert captured.training is mode
    assert captured.train(mode) is captured
    assert mode or captured.eval() is captured
    flags = [module.training for module in captured.modules()]
    with pytest.raises(CaptureError, match=rf"for {other} mode, call model.{'eval' if mode else 'train'}\(\)"):
        captured.train(not mode)
    assert [module.training for module in captured.modules()] == flags
    with pytest.raises(CaptureError):
        nn.Sequential(captured).train(not mode)


def test_a_model_without_modes_takes_both() -> None:
    captured = capture(nn.Sequential(nn.Linear(4, 4), nn.GELU()).eval(), torch.randn(3, 4))
    captured.train()
    assert all(module.training for module in captured.modules())
    captured.eval()
    assert not any(module.training for module in captured.modules())


def test_dropout_goes_in_evaluation_mode_and_stays_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU())
    for mode in (False, True):
        captured = capture(model.train(mode), torch.randn(3, 4))
        has_dropout = any("dropout" in str(node.target) for node in captured.graph.nodes)
        assert has_dropout is mode
    torch.manual_seed(0)
    x = torch.ones(5, 4)
    found = captured(x)
    torch.manual_seed(0)
    assert torch.equal(found, model(x))


def test_a_model_in_training_mode_is_told_what_that_changes(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Dropout(0.0))
    with caplog.at_level(logging.WARNING, "fxopt_capture"):
        capture(model, torch.randn(3, 4))
    assert [record.name for record in caplog.records if record.levelno == logging.WARNING] == ["fxopt_capture"]
    assert "Sequential is in training mode, and its graph will be too: every call draws anew in dropout" in caplog.text
    assert "For inference, call model.eval() before the capture" in caplog.text
