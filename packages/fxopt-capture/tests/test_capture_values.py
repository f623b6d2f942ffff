"""Inputs whose values decide sizes: one graph holds the values of its example, and refuses others."""

from __future__ import annotations

import logging
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


@pytest.mark.parametrize("values", [(1, 2, 3), (1, 2, True, 4), (1, 2, 3, 4.0), [1, 2, 3, 4]])
def test_an_archive_has_values_that_fill_the_sizes(values: Any) -> None:
    rows: Any = write_guards(InputGuards([InputSpec("grid", "integer", (2, 2), value=(1, 2, 3, 4))], []))
    read_guards(rows)(torch.tensor([[1, 2], [3, 4]]))
    spec = write_guards(InputGuards([InputSpec("grid", "integer", (2, 2), value=values)], []))
    with pytest.raises(MalformedError, match="the values of `grid` do not fill its sizes"):
        read_guards(spec)
