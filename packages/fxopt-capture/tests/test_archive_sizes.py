"""Which sizes an archive takes: the very ones that the graph module took that was saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt_capture import capture, export
from fxopt_capture.archive.files import load, save
from fxopt_core.errors import CaptureError


class Halves(nn.Module):
    """Takes rows in pairs, up to six of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        rows = x.shape[0]
        return self.linear(x).reshape(rows // 2, 2, -1).sum(1) if rows <= 6 else self.linear(x)


class Viewed(nn.Module):
    """Views two inputs as two rows; ``torch.export`` of its graph finds guards that it does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([self.left(x), self.right(y)]).view(2, -1)[:, :8]


class Rounded(nn.Module):
    """Leaves shares of the rows, and one to seven of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, rows = self.linear(x), x.shape[0]
        shares = [
            y[: round(rows * 0.3)],
            y[: math.ceil(rows / 4)],
            y[: math.floor(rows * 0.7)],
            y[: abs(rows - 3)],
            y[: -(rows // 3)],
        ]
        return torch.cat([*shares, y[: min(rows // 2, 7) + 1]])


SIZED = {
    "halves": (Halves, ((4,), (2,), (6,), (3,), (8,))),
    "rounded": (Rounded, ((8,), (2,), (5,), (30,))),
    "viewed": (Viewed, ((3, 5), (2, 2), (1, 1), (1, 2), (4, 7))),
}


@pytest.mark.parametrize("name", SIZED)
def test_guards_are_the_same_there_and_back(name: str, tmp_path: Path) -> None:
    """Neither more is refused after saving, nor less, by torch alone too."""
    cls, sizes = SIZED[name]
    original = capture(cls().eval(), tuple(torch.randn(size, 4) for size in sizes[0]))
    save(original, tmp_path / "once.fxopt")
    once = load(tmp_path / "once.fxopt")
    save(once, tmp_path / "twice.fxopt")
    assert str(load(tmp_path / "twice.fxopt")._guards_fn) == str(once._guards_fn) == str(original._guards_fn)
    module = export(once).module()
    for size in sizes:
        inputs = [torch.randn(rows, 4) for rows in size]
        try:
            expected = original(*inputs)
        except CaptureError:
            with pytest.raises(CaptureError, match="valid for inputs with"):
                once(*inputs)
            with pytest.raises(AssertionError):
                module(*inputs)
        else:
            assert torch.equal(once(*inputs), expected)
            assert torch.equal(module(*inputs), expected)


class Last(nn.Module):
    """Cuts the last three rows out by padding with a negative number; the graph is for eight rows."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        cut = nn.functional.pad(x, (0, 0, 3 - rows, 0))
        return cut * 2 if rows == 8 else cut


def test_a_number_below_zero_among_the_sizes(tmp_path: Path) -> None:
    x = torch.randn(8, 4)
    save(capture(Last(), (x,)), tmp_path / "last.fxopt")
    assert torch.equal(load(tmp_path / "last.fxopt")(x), Last()(x))
