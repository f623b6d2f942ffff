"""Inputs whose values decide sizes: one graph holds the values of its example, and refuses others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from archive_models import in_every_form
from torch import Tensor, nn

from fxopt_capture import capture, export
from fxopt_capture.archive.calls import read_guards, write_guards
from fxopt_capture.call.guards import InputGuards, InputSpec
from fxopt_core.errors import CaptureError
from fxopt_rewrite import MalformedError

PATCHES, GRID = torch.randn(10, 4), torch.tensor([[1, 2, 3], [1, 2, 2]])


class Images(nn.Module):
    """Positions and attention within each image, whose patches lie one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.positions = nn.Linear(4, 4), nn.Embedding(8, 4)

    def forward(self, patches: Tensor, grid_thw: Tensor) -> Tensor:
        grid_thw[:, 0] = 1
        places = [torch.arange(h)[:, None] + torch.arange(w) for _, h, w in grid_thw.tolist()]
        flat = torch.cat([place.flatten() for place in places])
        hidden = self.project(patches) + self.positions(flat)
        images: tuple[Tensor, ...] = hidden.split_with_sizes(grid_thw.prod(-1).tolist())
        mixed = [torch.softmax(image @ image.mT, -1) @ image for image in images if image.shape[0] > 1]
        return torch.cat(mixed)


@pytest.fixture(scope="module")
def model() -> Images:
    torch.manual_seed(0)
    return Images().eval()


def test_a_graph_holds_the_values_of_its_example_and_refuses_others(
    model: Images, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.WARNING):
        captured: Any = capture(model, (PATCHES, GRID))
    assert "Images: the graph is for these values of `grid_thw` alone, as they decide sizes" in caplog.text
    turned = GRID.flip(0)
    found = r"input `grid_thw` holds \[1, 2, 2, 1, 2, 3\], where the graph was captured with \[1, 2, 3, 1, 2, 2\]"
    for each in in_every_form(captured, tmp_path):
        torch.testing.assert_close(each(PATCHES, GRID), model(PATCHES, GRID))
        torch.testing.assert_close(each(PATCHES + 1, GRID.clone()), model(PATCHES + 1, GRID))
        with pytest.raises(CaptureError, match=found):
            each(PATCHES, turned)
    compiled: Any = torch.compile(captured, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(PATCHES, GRID), model(PATCHES, GRID))
    with torch.no_grad(), pytest.raises(CaptureError, match=found):
        compiled(PATCHES, turned)


def test_an_exported_program_asserts_the_values(model: Images) -> None:
    program = export(capture(model, (PATCHES, GRID))).module()
    torch.testing.assert_close(program(PATCHES, GRID), model(PATCHES, GRID))
    with pytest.raises(RuntimeError, match="values that decide sizes"):
        program(PATCHES, GRID.flip(0))


def test_a_model_without_weights_is_captured_for_the_values(model: Images) -> None:
    captured = capture(Images().to("meta").eval(), (PATCHES, GRID))
    captured.load_state_dict(model.state_dict(), assign=True)
    torch.testing.assert_close(captured(PATCHES, GRID), model(PATCHES, GRID))


class Scaled(nn.Module):
    """Reads the sizes of its images as numbers, and no size from them."""

    def forward(self, x: Tensor, image_sizes: Tensor) -> Tensor:
        return x / image_sizes.prod(-1, keepdim=True)


def test_values_that_decide_no_size_stay_inputs() -> None:
    captured = capture(Scaled(), (torch.ones(2, 3), torch.tensor([[2, 2], [3, 3]])))
    given = torch.ones(3, 3), torch.tensor([[1, 2], [3, 4], [5, 6]])
    torch.testing.assert_close(captured(*given), Scaled()(*given))


class Counting(nn.Module):
    """Reads a number from tokens, beside sizes."""

    def forward(self, tokens: Tensor, image_sizes: Tensor) -> Tensor:
        return tokens[: int(tokens.max())].repeat(int(image_sizes[0]))


def test_values_of_other_inputs_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"depends on the values of a tensor"):
        capture(Counting(), (torch.arange(4), torch.tensor([2])))


class Written(nn.Module):
    """Writes what it computes from its input into a tensor made from sizes."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        result = torch.zeros(int(lengths.sum()), x.shape[1])
        positions = torch.linspace(0, 1, int(lengths[0]))
        result[: int(lengths[0])] = x * positions[:, None]
        return result


def test_activations_are_written_into_tensors_of_these_sizes() -> None:
    given = torch.randn(3, 4), torch.tensor([3, 2])
    torch.testing.assert_close(capture(Written(), given)(*given), Written()(*given))


class Of(nn.Module):
    """Computes what a function gives, beside a result that has a size of its lengths."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, lengths: Tensor, shift: Tensor) -> Any:
        return torch.cat([x] * int(lengths.sum())), self.function(x, lengths, shift)


def with_sums(x: Tensor, lengths: Tensor, shift: Tensor) -> Tensor:
    result = torch.zeros_like(lengths, dtype=torch.float32)
    result += x.sum()
    return result


def shifted(x: Tensor, lengths: Tensor, shift: Tensor) -> Tensor:
    ends = lengths.cumsum(0)
    view = ends[:]
    view += shift
    return ends + 1


def from_a_factory(x: Tensor, lengths: Tensor, shift: Tensor) -> Tensor:
    index = torch.arange(int(lengths.sum()))
    index += shift[0]
    return x[(index + 1).clamp(0, 2)]


def with_sizes(x: Tensor, lengths: Tensor, shift: Tensor) -> Tensor:
    written = lengths.clone()
    written[0] = x.shape[0]
    return written * 2


def scattered(x: Tensor, lengths: Tensor, shift: Tensor) -> Tensor:
    rows = torch.repeat_interleave(torch.arange(2), lengths)[: x.shape[0]]
    return (
        lengths.new_zeros(2, x.shape[1], dtype=x.dtype).index_add_(0, rows, x[: rows.shape[0]]) / lengths.max().item()
    )


def doubled(x: Tensor, lengths: Tensor, shift: Tensor) -> Tensor:
    return lengths * 2


def themselves(x: Tensor, lengths: Tensor, shift: Tensor) -> Tensor:
    return lengths


def counted_up(x: Tensor, lengths: Tensor, shift: Tensor) -> Tensor:
    lengths += 1
    return x[: lengths[0]]


def in_rows_of(x: Tensor, lengths: Tensor, shift: Tensor) -> Tensor:
    return x.view(lengths[0], 2, lengths[1]).split(lengths[0] - 1)[0]


def the_first_rows(x: Tensor, lengths: Tensor, shift: Tensor) -> Tensor:
    return x[1 : lengths[1], : lengths.max()]


def from_a_written_start(x: Tensor, lengths: Tensor, shift: Tensor) -> Tensor:
    start = lengths.new_zeros(2)
    start[:] = shift
    return x[start.tolist()[0] :]


WRITTEN = [with_sums, shifted, from_a_factory, with_sizes, scattered, counted_up, from_a_written_start]
COMPUTED = [*WRITTEN, doubled, themselves, in_rows_of, the_first_rows]


@pytest.mark.parametrize("function", COMPUTED, ids=lambda function: function.__name__)
def test_a_graph_computes_what_the_model_does_with_each_call(function: Callable[..., Any]) -> None:
    model = Of(function).eval()
    lengths, none = torch.tensor([2, 3]), torch.zeros(2, dtype=torch.int64)
    captured = capture(model, (torch.randn(3, 4), lengths.clone(), none))
    for shift in (none, none + 1, none + 2):
        x, given, same = torch.randn(3, 4), lengths.clone(), lengths.clone()
        found, wanted = captured(x, given, shift), model(x, same, shift)
        torch.testing.assert_close(found, wanted)
        assert torch.equal(given, same)
        found[1].zero_()  # of the caller: the next call makes it anew


def test_random_numbers_are_drawn_in_each_call() -> None:
    captured = capture(Of(lambda x, lengths, shift: torch.bernoulli(lengths.float() / 4)), (x := torch.randn(3, 4),
        torch.tensor([2, 3]), torch.zeros(1)), compare=False)  # fmt: skip
    drawn = {tuple(captured(x, torch.tensor([2, 3]), torch.zeros(1))[1].tolist()) for _ in range(50)}
    assert len(drawn) > 1


def test_dtypes_and_sizes_are_those_of_the_values() -> None:
    x, lengths, shift = torch.randn(3, 4), torch.tensor([2, 3]), torch.zeros(1)
    with pytest.raises(CaptureError, match=r"`lengths` has dtype torch\.int32, where the graph was captured for"):
        capture(Of(doubled), (x, lengths, shift))(x, lengths.int(), shift)
    auto = torch.export.Dim.AUTO
    shapes = {"x": {0: auto}, "lengths": {0: auto}, "shift": None}
    with pytest.raises(CaptureError, match=r"values of `lengths` decide sizes, .* leave it out of `dynamic_shapes`"):
        capture(Of(doubled), (x, lengths, shift), dynamic_shapes=shapes)


def test_values_on_the_meta_device_are_not_invented() -> None:
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture(Images().to("meta").eval(), (PATCHES.to("meta"), GRID.to("meta")))


class EachOfABatch(nn.Module):
    """Sums as many rows of each sample as its length says."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return torch.stack(
            [rows[:length].sum(0) * len(range(length)) for rows, length in zip(x, lengths.tolist(), strict=True)]
        )


def test_a_batch_of_one_has_one_length() -> None:
    given = torch.randn(1, 5, 4), torch.tensor([3])
    torch.testing.assert_close(capture(EachOfABatch(), given)(*given), EachOfABatch()(*given))


def test_only_inputs_that_are_read_are_held() -> None:
    def beside(x: Tensor, lengths: Tensor, image_sizes: Tensor) -> Tensor:
        return x.repeat(int(lengths.sum()), 1) + image_sizes[0]

    class Beside(nn.Module):
        forward = staticmethod(beside)

    x, lengths, sizes = torch.randn(3, 2), torch.tensor([2, 3]), torch.tensor([[1, 2]])
    captured = capture(Beside(), (x, lengths, sizes))
    torch.testing.assert_close(captured(x, lengths, sizes + 5), beside(x, lengths, sizes + 5))
    torch.testing.assert_close(captured(x[:1], lengths, sizes), beside(x[:1], lengths, sizes))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((1, 2, 3), "do not fill its sizes"),
        ((1, 2, True, 4), "do not fill its sizes"),
        ((1, 2, 3, 4.0), "do not fill its sizes"),
        ([1, 2, 3, 4], "do not fill its sizes"),
        ((1, 2, 3, 2**70), "are beyond torch.int64"),
    ],
)
def test_an_archive_has_values_that_fill_the_sizes(values: Any, text: str) -> None:
    def spec(values: Any) -> Any:
        return write_guards(InputGuards([InputSpec("grid", "integer", (2, 2), values, torch.int64)], []))

    read_guards(spec((1, 2, 3, 4)))(torch.tensor([[1, 2], [3, 4]]))
    with pytest.raises(MalformedError, match=f"the values of `grid` {text}"):
        read_guards(spec(values))
