"""How many exports a capture takes, and what its guards say about sizes of 0 and 1."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from site_passes import Called
from torch import Tensor, nn

from fxopt_capture import InputGuards, capture
from fxopt_capture.exporting import program, strategy
from fxopt_core.errors import CaptureError


class Branching(nn.Module):
    """Computes by a condition on the batch, with one layer."""

    def __init__(self, condition: Callable[[int], bool], difference: float) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.condition = condition
        self.difference = difference

    def forward(self, x: Tensor) -> Any:
        return self.lin(x) + self.difference if self.condition(x.shape[0]) else self.lin(x)


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets an entry for each export: whether it was one for small sizes."""
    made: list[bool] = []
    original = program.export_program

    def counted(*args: Any, small_sizes: bool, **options: Any) -> Any:
        made.append(small_sizes)
        return original(*args, small_sizes=small_sizes, **options)

    monkeypatch.setattr(strategy, "export_program", counted)
    return made


ONCE: dict[str, Callable[[int], bool]] = {
    "never": lambda size: False,
    "one": lambda size: size == 1,
    "small": lambda size: size <= 1,
    "zero": lambda size: size == 0,
    "large": lambda size: size > 64,
}


@pytest.mark.parametrize("name", ONCE)
def test_one_export_where_guards_on_small_sizes_can_be_told(name: str, exports: list[bool]) -> None:
    captured = capture(Branching(ONCE[name], 1.0).eval(), torch.randn(3, 4))
    assert exports == [True]
    assert all(captured(torch.randn(size, 4)).shape == (size, 4) for size in (0, 2, 64))  # empty results are equal
    if ONCE[name](1):
        with pytest.raises(CaptureError, match=r"x.size\(\)\[0\] != 1"):
            captured(torch.randn(1, 4))
    else:
        assert captured(torch.randn(1, 4)).shape == (1, 4)


def test_a_branch_that_makes_no_difference_leaves_no_guard(exports: list[bool]) -> None:
    captured = capture(Branching(lambda size: size > 1, 0.0).eval(), torch.randn(3, 4))
    assert exports == [True]
    guards = captured.get_submodule("_guards_fn")
    assert isinstance(guards, InputGuards)
    assert guards.conditions == ()
    assert captured(torch.randn(1, 4)).shape == (1, 4)


class Step(nn.Module):
    """Takes rows, and weights for them and one more; may do something else of a single row."""

    def __init__(self, *, distinguishes: bool) -> None:
        super().__init__()
        self.distinguishes = distinguishes

    def forward(self, rows: Tensor, weights: Tensor) -> Tensor:
        found = torch.cat([rows, rows.new_ones(1)]) * weights
        return found + 1 if self.distinguishes and rows.shape[0] == 1 else found


@pytest.mark.parametrize("distinguishes", [True, False])
def test_sizes_that_differ_by_a_number_are_asked_about_together(distinguishes: bool, exports: list[bool]) -> None:
    model = Step(distinguishes=distinguishes)
    captured = capture(model, (torch.randn(4), torch.randn(5)))
    assert exports == [True]
    for size in (0, 2, 3, 9) if distinguishes else (0, 1, 2, 3, 9):
        inputs = torch.randn(size), torch.randn(size + 1)
        assert torch.equal(captured(*inputs), model(*inputs))
    if distinguishes:
        with pytest.raises(CaptureError, match=r"rows.size\(\)\[0\] == 1"):
            captured(torch.randn(1), torch.randn(2))


class Total(nn.Module):
    """Computes something else of no rows, by a condition that leaves no guard in an export."""

    def __init__(self, is_empty: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.is_empty = is_empty

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0) - 1 if self.is_empty(x) else x.sum(0)


@pytest.mark.parametrize("is_empty", [lambda x: x.shape[0] == 0, lambda x: x.numel() == 0])
def test_a_branch_on_nothing_is_refused(is_empty: Callable[[Tensor], bool], exports: list[bool]) -> None:
    captured = capture(Total(is_empty).eval(), torch.randn(3, 4))
    assert exports == [True]
    for size in (1, 2, 5):
        assert captured(torch.ones(size, 4)).tolist() == [size] * 4
    with pytest.raises(CaptureError, match=r"x.size\(\)\[0\] != 0 only"):
        captured(torch.ones(0, 4))


def test_what_the_model_refuses_of_nothing_the_graph_refuses_too(capsys: pytest.CaptureFixture[str]) -> None:
    class Ambiguous(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(x.shape[0], -1)

    captured = capture(Ambiguous().eval(), torch.randn(3, 4))
    assert captured(torch.ones(1, 4)).shape == (1, 4)
    with pytest.raises(CaptureError, match=r"x.size\(\)\[0\] != 0 only"):
        captured(torch.ones(0, 4))
    assert capsys.readouterr().err == ""


class Picked(nn.Module):
    """Reads the mask row by row, so that an empty one fails where there are rows: masks of transformers do so."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        rows = torch.arange(ids.shape[0])
        return torch.where(mask[rows[:, None], torch.arange(ids.shape[1])][..., None], self.embedding(ids), 0.0)


def test_nothing_of_all_inputs_is_taken_where_the_model_takes_it() -> None:
    """Though nothing of the mask alone is refused."""
    model = Picked().eval()
    ids, mask = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool)
    captured = capture(model, (ids, mask))
    for rows in (0, 1, 2):
        assert torch.equal(captured(ids[:rows], mask[:rows]), model(ids[:rows], mask[:rows]))
    with pytest.raises(IndexError):
        model(ids, mask[:0])
    with pytest.raises(CaptureError, match=r"not \(mask.size\(\)\[0\] == 0 and ids.size\(\)\[0\] != 0\) only"):
        captured(ids, mask[:0])


class Squeezed(nn.Module):
    """Divides a part of the rows by their number; of one row, `squeeze` leaves the columns."""

    def __init__(self, part: int, *dims: Any) -> None:
        super().__init__()
        self.part, self.dims = part, dims

    def forward(self, x: Tensor) -> Tensor:
        rows = x[: x.shape[0] // self.part].squeeze(*self.dims)
        return rows / rows.shape[0]


@pytest.mark.parametrize(
    ("part", "dims", "device"),
    [(1, (), "cpu"), (1, (-3,), "cpu"), (2, (), "cpu"), (2, ((0, 2),), "cpu"), (1, (0,), "meta")],
)
def test_a_rank_that_follows_from_sizes_leaves_no_guard_and_is_refused(part: int, dims: Any, device: str) -> None:
    model = nn.Sequential(nn.Linear(1, 1), Squeezed(part, *dims)).eval()
    captured = capture(copy.deepcopy(model).to(device), torch.randn(4, 5, 1)).to_empty(device="cpu")
    captured.load_state_dict(model.state_dict())
    x = torch.randn(3 * part, 5, 1)
    torch.testing.assert_close(captured(x), model(x))
    with pytest.raises(CaptureError, match="!= 1"):
        captured(x[:part])


def test_sizes_of_1_are_compared_wherever_they_may_be_dropped() -> None:
    halved = Called(lambda x: x[: x.shape[0] // 2].squeeze(0) * 2)  # whatever its rank is
    for rows in (6, 2):
        captured = capture(halved, torch.randn(rows, 4))
        for x in (torch.randn(5, 4), torch.randn(2, 4)):
            assert torch.equal(captured(x), halved(x))

    def ranked(x: Tensor) -> Tensor:
        with torch.no_grad():
            rows = x.squeeze(0)
        return rows * 2 if rows.dim() == 1 else rows

    captured = capture(Called(ranked), torch.randn(3, 4))
    with pytest.raises(CaptureError, match="!= 1"):
        captured(torch.randn(1, 4))
