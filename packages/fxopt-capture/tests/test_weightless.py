"""Models on the meta device are captured as if they were where their inputs are, and take no memory for weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from archive_models import layout
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_capture import InputGuards, capture
from fxopt_capture.exporting import program
from fxopt_core import CaptureError, iter_nodes


class Positions(nn.Module):
    """Makes tensors by itself: positions, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.again = self.lin

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[0], device=x.device)
        found: Tensor = self.norm(self.again(x)) + places[:, None]
        return found + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)


class Single(nn.Module):
    """Computes something else for a batch of one."""

    def __init__(self, difference: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 4), nn.Linear(4, 4))
        self.difference = difference

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found * (1 + self.difference) if x.shape[0] == 1 else found


def on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make().eval()


def conditions(graph_module: GraphModule) -> list[str]:
    guards = graph_module.get_submodule("_guards_fn")
    assert isinstance(guards, InputGuards)
    return list(guards.conditions)


@pytest.mark.parametrize("inputs", ["meta", "cpu"])
def test_the_graph_is_that_of_a_model_with_weights(inputs: str) -> None:
    model = on_meta(Positions)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    captured, expected = capture(model, torch.randn(2, 4).to(inputs)), capture(Positions().eval(), torch.randn(2, 4))
    assert layout(captured) == layout(expected)
    assert {*conditions(expected)} <= {*conditions(captured)}
    assert "meta" not in captured.code
    assert all(tensors[name] is tensor for name, tensor in model.named_parameters(remove_duplicate=False))
    assert all(captured.get_parameter(name) is tensors[name] for name in ("lin.weight", "again.weight", "norm.bias"))
    state = Positions().eval().state_dict()
    captured.load_state_dict(state, assign=True)
    expected.load_state_dict(state)
    x = torch.randn(5, 4)
    assert torch.equal(captured(x), expected(x))


@pytest.mark.parametrize("difference", [0.0, 1e-2], ids=str)
def test_sizes_of_one_are_refused_as_they_cannot_be_compared(difference: float) -> None:
    captured = capture(on_meta(lambda: Single(difference)), torch.randn(2, 4))
    expected = capture(Single(difference).eval(), torch.randn(2, 4))
    assert "i[0].size()[0] != 1" in conditions(captured)
    assert ("i[0].size()[0] != 1" in conditions(expected)) == (difference > 0)


def test_a_model_that_cannot_be_exported_is_as_before() -> None:
    class Refuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x) if bool(self.lin.weight.sum() > 0) else x

    model = on_meta(Refuses)
    weight = model.lin.weight
    with pytest.raises(CaptureError):
        capture(model, torch.randn(2, 2))
    assert model.lin.weight is weight and weight.is_meta


def test_no_memory_is_taken_for_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta(lambda: nn.Linear(1 << 17, 1 << 16, bias=False))  # 32 GiB
    seen = []
    original: Any = program.export_program

    def noted(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        weight = model.get_parameter("0.weight")
        seen.append((weight.device.type, weight.untyped_storage().nbytes() < 8))
        return original(model, *args, **kwargs)

    monkeypatch.setattr("fxopt_capture.exporting.strategy.export_program", noted)
    captured = capture(nn.Sequential(model), torch.empty(2, 1 << 17))
    assert set(seen) == {("cpu", True)}
    assert [node.op for node in iter_nodes(captured.graph)].count("call_module") == 2
    assert captured.get_parameter("0.weight") is model.weight


def test_a_capture_where_meta_is_the_default_device() -> None:
    class Counts(Positions):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.arange(4.0) + torch.ones(4)

    with torch.device("meta"):
        captured = capture(Counts().eval(), torch.randn(2, 4))
    assert "meta" not in captured.code
    model = Counts().eval()
    captured.load_state_dict(model.state_dict(), assign=True)
    x = torch.randn(3, 4)
    torch.testing.assert_close(captured(x), model(x))
