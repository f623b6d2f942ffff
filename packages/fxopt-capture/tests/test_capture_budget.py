"""The budget of exports whose sizes vary without being asked to."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from fxopt_capture import capture
from fxopt_capture.exporting import budget


class Windows(nn.Module):
    """Pads texts to windows of four, which makes quotients and remainders of their length."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pad(x, (0, (4 - x.shape[0] % 4) % 4))
        return x.view(x.shape[0] // 4, 4).sum(1)


@pytest.fixture
def nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "FLOOR", 0.0)
    monkeypatch.setattr(budget, "TIMES", 0.0)


@pytest.mark.usefixtures("nothing_allowed")
def test_what_takes_too_long_is_fixed_unless_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Windows(), torch.randn(7)
    with caplog.at_level("WARNING", "fxopt_capture"):
        captured = capture(model, x)
    assert "Windows: torch.export has spent 0 s" in caplog.text
    torch.testing.assert_close(captured(x), model(x))
    with pytest.raises(Exception, match="has size 9 in dimension 0"):
        captured(torch.randn(9))
    caplog.clear()
    asked = capture(model, x, dynamic_shapes={"x": {0: torch.export.Dim.AUTO}})
    assert "expressions of sizes" not in caplog.text
    torch.testing.assert_close(asked(torch.ones(6)), model(torch.ones(6)))


@pytest.mark.usefixtures("nothing_allowed")
def test_the_error_of_a_model_is_not_that_of_the_budget() -> None:
    class Failing(Windows):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise ValueError("no windows")

    with pytest.raises(Exception, match="Failing cannot be captured: ValueError: no windows"):
        capture(Failing(), torch.randn(7))


@pytest.mark.usefixtures("nothing_allowed")
def test_other_threads_have_no_budget() -> None:
    counted = budget.Budget().counted(max)
    assert counted(1, 2) == 2
    with pytest.raises(budget.OverBudgetError):
        [counted(1, 2) for _ in range(3)]
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(counted(1, 2) for _ in range(3)))
    thread.start()
    thread.join()
    assert found == [2, 2, 2]
