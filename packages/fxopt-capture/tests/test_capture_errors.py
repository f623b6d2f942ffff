"""Models that cannot be captured: the error says where and what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from fxopt_capture import capture, symbolic_trace
from fxopt_core.errors import CaptureError


class DataDependent(nn.Module):
    """Branches on values."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


class Item(nn.Module):
    """Branches on a number taken out of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        count = int(x.max().item())
        if count > 3:
            return x
        return x * count


def line_of(cls: type[nn.Module], text: str) -> int:
    lines, start = inspect.getsourcelines(cls)
    return start + next(index for index, line in enumerate(lines) if text in line)


@pytest.mark.parametrize(("cls", "text"), [(DataDependent, "if x.sum()"), (Item, "count = ")])
def test_data_dependent_branch_names_the_line(
    cls: type[nn.Module], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(cls().eval(), torch.randn(2, 3))
    message = str(caught.value)
    assert f"{cls.__name__} cannot be captured" in message
    assert f"{__file__}:{line_of(cls, text)}, in forward" in message
    assert "depends on the values of a tensor" in message
    assert caught.value.__cause__ is not None
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("entry", [capture, symbolic_trace])
def test_no_modules(entry: Callable[..., object]) -> None:
    with pytest.raises(CaptureError, match="a function cannot be captured; give a torch"):
        entry(lambda x: x)
    with pytest.raises(CaptureError, match="compile returned"):
        entry(torch.compile(nn.ReLU(), backend="eager"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchscript() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(CaptureError, match="Linear is a TorchScript module"):
        capture(scripted, torch.randn(2, 2))


def test_no_inputs() -> None:
    with pytest.raises(CaptureError, match=r"forward\(input: torch.Tensor\)"):
        capture(nn.Linear(2, 2))


def test_wrong_arguments() -> None:
    with pytest.raises(CaptureError, match="does not take the arguments given"):
        capture(nn.Linear(2, 2), (torch.randn(2, 2),), {"mask": torch.ones(2)})
    with pytest.raises(CaptureError, match="args is a mapping; give keyword arguments as kwargs"):
        capture(nn.Linear(2, 2), {"input": torch.randn(2, 2)})  # type: ignore[arg-type]  # what is refused here
    with pytest.raises(CaptureError, match="no tensor to capture it with"):
        capture(nn.Linear(2, 2), (3,))


def test_a_capture_is_not_traced_again() -> None:
    with pytest.raises(CaptureError, match="fx cannot trace a captured module again; its graph is ready for passes"):
        torch.fx.symbolic_trace(nn.Sequential(capture(nn.Linear(4, 3), torch.randn(2, 4))))


class Sum(nn.Module):
    """Adds two inputs, whose sizes have to agree."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def test_a_dynamic_size_of_one_is_sent_to_two() -> None:
    shapes = {"x": {0: Dim("x")}, "y": {0: Dim("y")}}
    with pytest.raises(CaptureError, match="give sizes of 2 or more where they should vary, since torch may treat 1"):
        capture(Sum().eval(), (torch.randn(1, 4), torch.randn(3, 4)), dynamic_shapes=shapes)


def test_sizes_that_are_not_free() -> None:
    shapes = {"x": {0: Dim("x")}, "y": {0: Dim("y")}}
    with pytest.raises(CaptureError, match="cannot vary freely in this model; leave them out of") as caught:
        capture(Sum().eval(), (torch.randn(3, 4), torch.randn(3, 4)), dynamic_shapes=shapes)
    assert "values of a tensor" not in str(caught.value)


class Lenient(nn.Module):
    """Takes arguments of any name, and needs one."""

    def forward(self, ids: Tensor | None = None, **options: Tensor) -> Tensor:
        if ids is None:
            raise ValueError("give ids")
        return ids * options.get("scale", torch.ones(()))


def test_names_that_only_a_catch_all_takes() -> None:
    x = torch.randn(2, 3)
    assert torch.equal(capture(Lenient().eval(), (x,), {"scale": torch.tensor(2.0)})(x, scale=torch.tensor(3.0)), 3 * x)
    with pytest.raises(CaptureError, match=r"Lenient.forward takes no input 'idss'; did you mean 'ids'"):
        capture(Lenient().eval(), (x,), {"idss": torch.tensor(2.0)})
    with pytest.raises(CaptureError, match="no input 'idz'; did you mean 'ids'") as caught:
        capture(Lenient().eval(), (), {"idz": x})
    assert "ValueError: give ids" in str(caught.value)


def test_loops_over_steps_are_sent_to_the_backend() -> None:
    class Loop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([step.cumsum(0) for step in x.unbind(1)])

    captured = capture(Loop().eval(), torch.randn(2, 5, 4))
    with pytest.raises(CaptureError, match=r"where the model itself fixes it, torch\.compile\(model"):
        captured(torch.randn(2, 6, 4))
