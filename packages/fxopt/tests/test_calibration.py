"""`optimize` with ranges from data: few data, and models that calls change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt import history, optimize
from fxopt_cpu import isa

pytestmark = pytest.mark.skipif(isa() is None, reason="the library was not built")


class Counting(nn.Module):
    """Counts its calls, in a buffer and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)
        self.register_buffer("total", torch.zeros(1))
        self.count = 0

    def forward(self, x: Tensor) -> Any:
        self.get_buffer("total").add_(1)
        self.count += 1
        return self.down(self.up(x).relu())


@pytest.mark.parametrize("rows", [2, 600])
def test_other_inputs_are_nearly_as_exact_as_those_of_the_calibration(rows: int) -> None:
    torch.manual_seed(0)
    model, x, other = Counting().eval(), torch.randn(rows, 128), torch.randn(64, 128)
    fast = optimize(model, (x,), pipeline="cpu-inference-int8-static")
    assert [hasattr(layer, "rounding") for layer in (fast.up_panels, fast.down_panels)] == [rows > 2] * 2
    assert any(each.reason == "no-range" for record in history(fast) for each in record.refusals) == (rows == 2)
    assert (fast(other) - model(other)).norm() < 0.08 * model(other).norm()


def test_calibration_changes_neither_the_model_nor_its_graph() -> None:
    model, drawn = Counting().eval(), torch.empty(0)

    def calibrate(stand_in: Any) -> None:
        drawn.set_(torch.randn(600, 128))  # type: ignore[call-overload]  # of torch
        assert [stand_in.total.item() for _ in range(2) if stand_in(drawn) is not None] == [1, 2]

    fast = optimize(model, (torch.ones(2, 128),), pipeline="cpu-inference-int8-static", calibrate=calibrate)
    assert not (model.count or model.get_buffer("total") or fast.get_buffer("total"))
    assert not torch.equal(torch.randn(600, 128), drawn)
