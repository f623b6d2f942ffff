"""Which inputs a captured graph accepts, and that it never computes something wrong with the others."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from site_passes import Called
from torch import Tensor, nn
from torch.export import Dim, ShapesCollection
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxopt_capture import capture
from fxopt_core.errors import CaptureError


class Branching(nn.Module):
    """Computes something else where a condition on the batch holds."""

    def __init__(self, condition: Callable[[int], bool]) -> None:
        super().__init__()
        self.condition = condition

    def forward(self, x: Tensor) -> Any:
        return x * 2 if self.condition(x.shape[0]) else x + 1


CONDITIONS = {
    "one": lambda size: size == 1,
    "empty": lambda size: size == 0,
    "small": lambda size: size <= 1,
    "large": lambda size: size > 4,
    "even": lambda size: size % 2 == 0,
    "three": lambda size: size == 3,
}


@pytest.mark.parametrize(
    ("name", "batch"),
    [*((name, batch) for name in CONDITIONS for batch in (1, 2)), ("even", 3), ("three", 3), ("large", 6)],
)
def test_a_branch_on_the_batch_is_never_wrong(name: str, batch: int) -> None:
    model = Branching(CONDITIONS[name]).eval()
    captured = capture(model, torch.randn(batch, 4))
    accepted = []
    for size in range(8):
        x = torch.randn(size, 4)
        try:
            found = captured(x)
        except CaptureError:
            continue
        accepted.append(size)
        assert torch.equal(found, model(x))
    assert batch in accepted


def test_guards_stay_where_torch_suppresses_them() -> None:
    model = Branching(CONDITIONS["large"]).eval()
    with ShapeEnv().suppress_guards():
        captured = capture(model, torch.randn(2, 4))
        assert ShapeEnv._suppress_guards_tls()
    assert not ShapeEnv._suppress_guards_tls()
    assert torch.equal(captured(torch.ones(4, 4)), torch.ones(4, 4) + 1)
    with pytest.raises(CaptureError, match="x"):
        captured(torch.ones(5, 4))


def test_a_model_for_a_batch_of_one_only() -> None:
    captured = capture(Called(lambda x: x.reshape(4)).eval(), torch.randn(1, 4))
    assert captured(torch.ones(1, 4)).shape == (4,)
    with pytest.raises(CaptureError, match="size 2 in dimension 0, where the graph was captured for 1"):
        captured(torch.ones(2, 4))


class Add(nn.Module):
    """Adds two inputs."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def test_inputs_of_unequal_batch_are_refused() -> None:
    captured = capture(Add().eval(), (torch.randn(2, 4), torch.randn(2, 4)))
    assert captured(torch.ones(3, 4), torch.ones(3, 4)).shape == (3, 4)
    with pytest.raises(CaptureError, match=r"size\(\)"):
        captured(torch.ones(3, 4), torch.ones(4, 4))


def test_an_input_that_is_broadcast() -> None:
    captured = capture(Add().eval(), (torch.randn(3, 4), torch.randn(1, 4)))
    assert captured(torch.ones(5, 4), torch.ones(1, 4)).shape == (5, 4)
    with pytest.raises(
        CaptureError, match="`y` has size 5 in dimension 0, where the graph was captured for 1; a size of 1"
    ):
        captured(torch.ones(5, 4), torch.ones(5, 4))


@pytest.fixture(scope="module")
def linear() -> GraphModule:
    return capture(nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(2, 4))


def test_the_guards_hold_without_the_hooks_too(linear: GraphModule) -> None:
    with pytest.raises(CaptureError):
        torch.fx.Interpreter(linear).run(torch.zeros(2, 5))
    with pytest.raises(CaptureError):
        linear.forward(torch.zeros(2, 5))


def test_requested_dimensions() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.ReLU()).eval()
    captured = capture(model, torch.randn(2, 2, 8), dynamic_shapes={"input": {0: Dim.AUTO, 2: Dim("length", max=64)}})
    assert captured(torch.randn(3, 2, 20)).shape == (3, 3, 20)
    with pytest.raises(CaptureError, match=r"input.size\(\)\[2\] <= 64"):
        captured(torch.randn(3, 2, 65))


@pytest.mark.parametrize("shapes", [({0: Dim.AUTO}, None), [(Dim.AUTO, None), (None, None)], {"x": {0: Dim("b")}}])
def test_requested_shapes_by_position_or_name(shapes: object) -> None:
    class Matmul(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x @ y

    captured = capture(Matmul().eval(), (torch.randn(2, 4), torch.randn(4, 4)), dynamic_shapes=shapes)
    assert captured(torch.randn(7, 4), torch.randn(4, 4)).shape == (7, 4)
    with pytest.raises(CaptureError, match="`y` has size 5"):
        captured(torch.randn(7, 4), torch.randn(5, 4))


def test_requested_shapes_as_a_collection() -> None:
    x = torch.randn(2, 6)
    shapes = ShapesCollection()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    shapes[x] = {0: Dim.STATIC, 1: Dim.AUTO}
    captured = capture(nn.ReLU().eval(), x, dynamic_shapes=shapes)
    assert captured(torch.randn(2, 9)).shape == (2, 9)
    with pytest.raises(CaptureError, match="dimension 0"):
        captured(torch.randn(3, 9))


def test_related_dimensions() -> None:
    class Shifted(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x[1:] + y

    length = Dim("length", min=3)
    captured = capture(
        Shifted().eval(), (torch.randn(6), torch.randn(5)), dynamic_shapes={"x": {0: length + 1}, "y": {0: length}}
    )
    assert captured(torch.randn(9), torch.randn(8)).shape == (8,)
    with pytest.raises(CaptureError):
        captured(torch.randn(9), torch.randn(9))
    with pytest.raises(CaptureError, match=">= 3"):
        captured(torch.randn(3), torch.randn(2))


def test_unknown_and_malformed_requests() -> None:
    with pytest.raises(CaptureError, match="names 'y', which is not among the tensor inputs of this capture: input"):
        capture(nn.ReLU(), torch.randn(2, 2), dynamic_shapes={"y": {0: Dim.AUTO}})
    with pytest.raises(CaptureError, match="dynamic_shapes is an int"):
        capture(nn.ReLU(), torch.randn(2, 2), dynamic_shapes=3)


def test_a_request_that_the_model_does_not_allow() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    with pytest.raises(CaptureError, match="features"):
        capture(model, torch.randn(2, 4), dynamic_shapes={"input": {1: Dim("features")}})


def test_a_capture_can_be_captured_again(linear: GraphModule) -> None:
    again = capture(linear, torch.randn(2, 4))
    x = torch.randn(5, 4)
    assert torch.equal(again(x), linear(x))
    assert list(again.state_dict()) == list(linear.state_dict())


def test_a_capture_compiles(linear: GraphModule) -> None:
    compiled = torch.compile(linear, backend="eager", fullgraph=True)
    x = torch.randn(3, 4)
    assert torch.equal(compiled(x), linear(x))


class Converting(nn.Module):
    """Converts its first input to the dtype of the second."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.to(y.dtype) + y


def test_a_dtype_that_is_baked_in_is_checked() -> None:
    captured = capture(Converting().eval(), (torch.ones(3, 2), torch.ones(3, 2)))
    assert torch.equal(captured(torch.ones(3, 2), torch.ones(3, 2)), torch.full((3, 2), 2.0))
    message = r"`x` has dtype torch\.float64, where the graph was captured for torch\.float32 and contains conversions"
    for other in (captured, pickle.loads(pickle.dumps(captured)), copy.deepcopy(captured)):
        with pytest.raises(CaptureError, match=message):
            other(torch.ones(3, 2).double(), torch.ones(3, 2).double())
