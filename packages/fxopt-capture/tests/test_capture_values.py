"""Inputs whose values decide sizes: one graph is for the values that the model reads, and refuses others."""

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
X, LENGTHS, NONE = torch.randn(3, 4), torch.tensor([2, 3]), torch.zeros(2, dtype=torch.int64)


class Images(nn.Module):
    """Positions and attention within each image, whose patches lie one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.positions = nn.Linear(4, 4), nn.Embedding(8, 4)

    def forward(self, patches: Tensor, grid_thw: Tensor) -> Tensor:
        grid_thw[:, 0] = 1
        places = [(torch.arange(h)[:, None] + torch.arange(w)).flatten() for _, h, w in grid_thw.tolist()]
        hidden = self.project(patches) + self.positions(torch.cat(places))
        images: tuple[Tensor, ...] = hidden.split_with_sizes(grid_thw.prod(-1).tolist())
        return torch.cat([torch.softmax(image @ image.mT, -1) @ image for image in images if image.shape[0] > 1])


@pytest.fixture(scope="module")
def model() -> Images:
    torch.manual_seed(0)
    return Images().eval()


def test_a_graph_is_for_the_values_of_its_example_and_refuses_others(
    model: Images, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.WARNING):
        captured: Any = capture(model, (PATCHES, GRID))
    assert "Images: the graph is for these values of `grid_thw` alone, as they decide sizes" in caplog.text
    found = r"input `grid_thw` holds \[1, 2, 2, 1, 2, 3\], where the graph was captured with \[1, 2, 3, 1, 2, 2\]"
    for each in in_every_form(captured, tmp_path):
        torch.testing.assert_close(each(PATCHES + 1, GRID.clone()), model(PATCHES + 1, GRID))
        with pytest.raises(CaptureError, match=found):
            each(PATCHES, GRID.flip(0))
    compiled: Any = torch.compile(captured, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(PATCHES, GRID), model(PATCHES, GRID))
    with torch.no_grad(), pytest.raises(CaptureError, match=found):
        compiled(PATCHES, GRID.flip(0))
    program = export(captured).module()
    torch.testing.assert_close(program(PATCHES, GRID), model(PATCHES, GRID))
    with pytest.raises(RuntimeError, match="values that decide sizes"):
        program(PATCHES, GRID.flip(0))


def test_a_model_without_weights_is_captured_for_values_that_were_given(model: Images) -> None:
    captured = capture(Images().to("meta").eval(), (PATCHES, GRID))
    captured.load_state_dict(model.state_dict(), assign=True)
    torch.testing.assert_close(captured(PATCHES, GRID), model(PATCHES, GRID))
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture(Images().to("meta").eval(), (PATCHES.to("meta"), GRID.to("meta")))


class Of(nn.Module):
    """Computes what a function gives, beside a result that has a size of its lengths."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, lengths: Tensor, shift: Tensor) -> Any:
        return torch.cat([x] * int(lengths.sum())), self.function(x, lengths, shift)


def shifted(x: Tensor, lengths: Tensor, shift: Tensor) -> Tensor:
    ends = lengths.cumsum(0)
    ends[:].add_(shift)  # through a view
    return ends + 1


def with_sizes(x: Tensor, lengths: Tensor, shift: Tensor) -> Tensor:
    written = lengths.clone()
    written[0] = x.shape[0]
    return written * 2


def scattered(x: Tensor, lengths: Tensor, shift: Tensor) -> Tensor:
    rows = torch.repeat_interleave(torch.arange(2), lengths)[: x.shape[0]]
    return lengths.new_zeros(2, 4, dtype=x.dtype).index_add_(0, rows, x) / lengths.max().item()


def from_a_written_start(x: Tensor, lengths: Tensor, shift: Tensor) -> Tensor:
    start = lengths.new_zeros(2)
    start[:] = shift
    return x[start.tolist()[0] :]


def in_inference_mode(x: Tensor, lengths: Tensor, shift: Tensor) -> Tensor:
    with torch.inference_mode():
        ends = lengths.cumsum(0)
    return ends + 1


COMPUTED: dict[str, Callable[..., Any]] = {
    "sums": lambda x, lengths, shift: torch.zeros_like(lengths, dtype=torch.float32).add_(x.sum()),
    "shifted": shifted,
    "from a factory": lambda x, lengths, shift: torch.arange(int(lengths.sum())).add_(shift[0]) + 1,
    "with sizes": with_sizes,
    "scattered": scattered,
    "counted up": lambda x, lengths, shift: x[: lengths.add_(1)[0]],
    "from a written start": from_a_written_start,
    "doubled": lambda x, lengths, shift: lengths * 2,
    "themselves": lambda x, lengths, shift: lengths,
    "in rows of": lambda x, lengths, shift: x.view(lengths[0], 2, lengths[1]).split(lengths[0] - 1)[0],
    "within a size": lambda x, lengths, shift: lengths[: x.shape[0] - 1] * 2,
    "by keywords": lambda x, lengths, shift: torch.reshape(input=lengths, shape=(1, 2)),
    "of a list": lambda x, lengths, shift: x[: torch.tensor([lengths[0], lengths[1]]).tolist()[0]],
    "in inference mode": in_inference_mode,
    "the first rows": lambda x, lengths, shift: x[1 : lengths[1], : lengths.max()],
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_graph_computes_what_the_model_does_with_each_call(name: str) -> None:
    model = Of(COMPUTED[name]).eval()
    captured = capture(model, (X, LENGTHS.clone(), NONE))
    for shift in (NONE, NONE + 1, NONE + 2):
        x, given, same = torch.randn(3, 4), LENGTHS.clone(), LENGTHS.clone()
        found = captured(x, given, shift)
        torch.testing.assert_close(found, model(x, same, shift))
        assert torch.equal(given, same)
        found[1].zero_()  # of the caller: the next call makes it anew


def test_random_numbers_are_drawn_in_each_call() -> None:
    model = Of(lambda x, lengths, shift: torch.bernoulli(lengths.float() / 4))
    captured = capture(model, (X, LENGTHS, NONE), compare=False)
    assert len({tuple(captured(X, LENGTHS, NONE)[1].tolist()) for _ in range(50)}) > 1


def test_dtypes_are_those_of_the_values_and_sizes_that_a_caller_names_vary() -> None:
    model = Of(lambda x, lengths, shift: lengths * 2)
    with pytest.raises(CaptureError, match=r"`lengths` has dtype torch\.int32, where the graph was captured for"):
        capture(model, (X, LENGTHS, NONE))(X, LENGTHS.int(), NONE)
    shapes = {"x": {0: torch.export.Dim.AUTO}, "lengths": None, "shift": None}
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture(model, (X, LENGTHS, NONE), dynamic_shapes=shapes)


class Called(nn.Module):
    """Calls a function of two inputs."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, lengths: Tensor, image_sizes: Tensor) -> Tensor:
        return self.function(x, lengths, image_sizes)


def test_only_inputs_that_are_read_are_held() -> None:
    for reads, others in ((False, LENGTHS + 1), (True, LENGTHS)):
        model = Called(
            lambda x, lengths, sizes, reads=reads: x.repeat(int(lengths.sum()) if reads else 1, 1) + sizes[0]
        )
        captured = capture(model, (X, LENGTHS, GRID[:1, 1:2]))
        given = X[:1], others, GRID[1:, 2:]
        torch.testing.assert_close(captured(*given), model(*given))


def test_a_batch_of_one_has_one_length() -> None:
    model = Called(lambda x, lengths, _: torch.stack([a[:n] * len(range(n)) for a, n in zip(x, lengths.tolist())]))  # noqa: B905
    given = torch.randn(1, 5, 4), torch.tensor([3]), torch.tensor([1])
    torch.testing.assert_close(capture(model, given)(*given), model(*given))


def test_lengths_may_be_read_through_floats() -> None:
    class Shares(nn.Module):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return x[: int((lengths.float() * 0.5).max())]

    captured = capture(Shares().eval(), (X, LENGTHS))
    assert torch.equal(captured(X, LENGTHS), X[:1])
    with pytest.raises(CaptureError, match=r"`lengths` holds \[8, 3\]"):
        captured(X, torch.tensor([8, 3]))


def test_values_of_other_inputs_are_refused() -> None:
    class Counting(nn.Module):
        def forward(self, tokens: Tensor, image_sizes: Tensor) -> Tensor:
            return tokens[: int(tokens.max())].repeat(len(range(int(tokens[0]))), int(image_sizes[0]))

    with pytest.raises(CaptureError, match=r"depends on the values of a tensor"):
        capture(Counting(), (torch.arange(4), torch.tensor([2])))


@pytest.mark.parametrize("values", [(1, 2, 3), "1234", [1, 2, 3, 4], (1, "2", 3, 4), (1, 2, 3, 2**70)])
def test_an_archive_has_values_that_fill_the_sizes(values: Any) -> None:
    def rows(values: Any) -> Any:
        return write_guards(InputGuards([InputSpec("grid", "integer", (2, 2), values, torch.int64)], []))

    read_guards(rows((1, 2, 3, 4)))(torch.tensor([[1, 2], [3, 4]]))
    with pytest.raises(MalformedError, match="the values of `grid` do not fill its sizes"):
        read_guards(rows(values))
