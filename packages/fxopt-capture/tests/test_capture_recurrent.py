"""Recurrent layers: any number of steps, in graphs, archives and programs."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxopt_capture import capture, export, load, save
from fxopt_capture._torch import any_number_of_steps
from fxopt_core.errors import CaptureError

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*were assigned during export:UserWarning", "ignore:LSTM with projections is not supported:UserWarning"
)
KINDS: list[tuple[Any, dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "proj_size": 3, "batch_first": True}),
    (nn.GRU, {"bidirectional": True, "batch_first": True, "bias": False}),
    (nn.RNN, {"nonlinearity": "relu"}),
    (nn.RNN, {"num_layers": 2}),
]


def check(model: nn.Module, captured: Any, *sizes: tuple[int, ...]) -> None:
    for size in sizes:
        x = torch.randn(size)
        expected, found = model(x), captured(x)
        torch.testing.assert_close(found, expected)
        assert str(torch.utils._pytree.tree_map(Tensor.stride, found)) == str(
            torch.utils._pytree.tree_map(Tensor.stride, expected)
        )


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_the_number_of_steps_is_free(kind: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = kind(4, 5, **options).eval()
    captured = capture(model, torch.randn(3, 7, 4))
    check(model, captured, (3, 7, 4), (2, 11, 4), (5, 2, 4), (1, 1, 4))
    with pytest.raises(CaptureError):
        captured(torch.randn((2, 0, 4) if options.get("batch_first") else (0, 2, 4)))  # which torch refuses, too


@pytest.mark.parametrize("batch", [1, 3])
def test_states_that_are_given_are_inputs(batch: int) -> None:
    model = nn.LSTM(4, 5).eval()
    state = torch.randn(1, batch, 5), torch.randn(1, batch, 5)
    captured = capture(model, (torch.randn(7, batch, 4), state))
    x = torch.randn(7 if batch == 1 else 9, batch, 4)  # of one, which may be broadcast, all sizes are fixed
    torch.testing.assert_close(captured(x, state), model(x, state))


class Lines(nn.Module):
    """Reads lines of one height and any width, as recognizers of texts do."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.MaxPool2d((2, 1)))
        self.steps, self.letters = nn.LSTM(32, 8, bidirectional=True), nn.Linear(16, 11)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.steps(self.features(x).flatten(1, 2).permute(2, 0, 1))
        letters: Tensor = self.letters(states)
        return letters


def test_lines_of_any_width_are_read_in_every_form() -> None:
    model = Lines().eval()
    captured: Any = capture(model, torch.randn(2, 1, 32, 48))
    file, program = io.BytesIO(), io.BytesIO()
    save(captured, file)
    torch.export.save(export(captured), program)
    file.seek(0)
    program.seek(0)
    for form in (captured, load(file), torch.export.load(program).module()):
        check(model, form, (2, 1, 32, 48), (3, 1, 32, 80), (2, 1, 32, 33))
    with pytest.raises(CaptureError, match="has size 40 in dimension 2"):
        captured(torch.randn(2, 1, 40, 48))


def test_packed_sequences_are_sent_to_the_backend() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.GRU(4, 5, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return nn.utils.rnn.pad_packed_sequence(self.steps(packed)[0], batch_first=True)[0]

    with pytest.raises(CaptureError, match=r'torch\.compile\(model, backend="fxopt"\) rewrites it'):
        capture(Packed().eval(), (torch.randn(3, 7, 4), torch.tensor([7, 2, 4])))


def test_others_trace_the_steps_as_before() -> None:
    model, x = nn.RNN(4, 5).eval(), torch.randn(3, 2, 4)
    with any_number_of_steps(), torch.no_grad():
        torch.testing.assert_close(make_fx(model)(x)(x), model(x))


class Rows(nn.Module):
    """Runs a recurrent layer row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.lstm(row[None])[0][0] for row in x])


def test_a_loop_over_a_batch_of_one_leaves_the_steps_free() -> None:
    model = Rows().eval()
    captured = capture(model, torch.randn(1, 3, 4))
    check(model, captured, (1, 3, 4), (1, 5, 4))
    with pytest.raises(CaptureError, match="size 2 in dimension 0, where the graph was captured for 1"):
        captured(torch.randn(2, 5, 4))
