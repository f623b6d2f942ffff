"""Inputs that a model takes by its ``**kwargs`` and does not read: its graph takes and ignores them too."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from archive_models import in_every_form
from torch import Tensor, nn

from fxopt_capture import capture
from fxopt_core.errors import CaptureError

X = torch.randn(2, 3)
MASK = torch.ones(2, 5)  # named `pixel_mask`, which is like `pixel_values` and no misspelling of it


class Open(nn.Module):
    """Takes any keyword, and reads one."""

    def forward(self, pixel_values: Tensor, **options: Tensor) -> Tensor:
        return pixel_values * options["scale"] if "scale" in options else pixel_values


class Choosing(nn.Module):
    """Computes something else as soon as it is given a keyword, whose values it does not read."""

    def forward(self, x: Tensor, **options: Tensor) -> Tensor:
        return x * 2 if "pixel_mask" in options else x


def test_what_the_model_ignores_the_graph_ignores(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING):
        captured = capture(Open().eval(), (X,), {"pixel_mask": MASK})
    assert "Open: the graph ignores `pixel_mask`, as the model does" in caplog.text
    for each in in_every_form(captured, tmp_path):
        for given in ({}, {"pixel_mask": MASK}, {"pixel_mask": MASK[:0].bool()}, {"pixel_mask": None}):
            assert torch.equal(each(X, **given), X)
            assert torch.equal(each(pixel_values=X, **given), X)
        with pytest.raises(CaptureError, match="without `scale`"):
            each(X, scale=MASK)


def test_what_the_model_reads_is_an_input_beside() -> None:
    captured = capture(Open().eval(), (X,), {"pixel_mask": MASK, "scale": torch.tensor(3.0)})
    assert torch.equal(captured(X, scale=torch.tensor(4.0), pixel_mask=MASK), 4 * X)
    with pytest.raises(CaptureError, match="needs `scale`"):
        captured(X, pixel_mask=MASK)


def test_a_keyword_that_decides_by_being_there_is_not_ignored() -> None:
    with pytest.raises(CaptureError, match="does not compute what the model does on the example"):
        capture(Choosing().eval(), (X,), {"pixel_mask": MASK})
