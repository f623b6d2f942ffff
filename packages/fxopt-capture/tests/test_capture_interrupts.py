"""An interrupt of a capture or a save is an interrupt, wherever it comes, and leaves everything as it was."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from fxopt_capture.archive.files import load, save
from fxopt_capture.capture import capture

faults = pytest.importorskip("fault_injection", reason="needs the tests of fxopt-testing")

X = torch.linspace(-1, 1, 8).reshape(2, 4)
POINTS = 3 if settings.default is None or settings.default.max_examples <= 100 else 400


class Counting(nn.Module):
    """A model with state of every kind that a capture has to give back."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.notes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.notes.append(1)
        return torch.as_tensor(self.second(torch.relu(self.first(x)) + self.seen))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Counting().eval()


def interrupted(action: Callable[[], object], moment: str, check: Callable[[str], None]) -> int:
    """Interrupt an action at calls spread evenly over all that it makes; return how many there were."""
    action()  # what is imported and cached once is so from here on
    injector = faults.Injector(moment)
    calls = faults.some(POINTS)(injector.calls(action))
    for call in calls:
        try:
            injector.fail(action, call.number, faults.InjectedInterrupt(f"injected at {call}"))
        except faults.InjectedInterrupt:
            pass
        except BaseException as error:
            raise AssertionError(f"{call}: came out as {type(error).__name__}: {error}") from error
        check(str(call))
    return len(calls)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_capture(model: nn.Module, moment: str) -> None:
    """The model and its parameters are the same objects with the same contents, and the next capture is right."""
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model.second(torch.relu(model.first(X)))  # type: ignore[operator]  # they are modules

    def check(call: str) -> None:
        assert {name: dict(vars(module)) for name, module in model.named_modules()} == attributes, call
        assert model.notes == [], call
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items()), call

    assert interrupted(lambda: capture(model, X), moment, check) == POINTS
    graph_module = capture(model, X)
    torch.testing.assert_close(graph_module(X), expected)
    torch.testing.assert_close(graph_module(X[:1]), expected[:1])


@pytest.mark.parametrize("moment", ["before", "after"])
def test_save(model: nn.Module, moment: str, tmp_path: Path) -> None:
    """The file is the old one or the new one, nothing is beside it, and the graph module still works."""
    graph_module = capture(model, X)
    expected, code = graph_module(X), graph_module.code
    path = tmp_path / "model.fxopt"

    def check(call: str) -> None:
        assert os.listdir(tmp_path) == ["model.fxopt"], call
        assert graph_module.code == code, call

    assert interrupted(lambda: save(graph_module, path), moment, check) == POINTS
    torch.testing.assert_close(graph_module(X), expected)
    torch.testing.assert_close(load(path)(X), expected)


class TestErrorsThatWereInterrupts:
    """Torch puts what is raised while it traces into errors of its own."""

    def test_a_model_that_is_interrupted_and_says_so_in_its_own_words(self) -> None:
        class Words(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                try:
                    raise KeyboardInterrupt
                except KeyboardInterrupt as error:
                    raise ValueError("stopped") from error

        with pytest.raises(KeyboardInterrupt):
            capture(Words(), X)

    def test_what_the_caller_handles_already_is_not_meant(self) -> None:
        """Whoever captures after Ctrl-C gets the capture's own error."""
        with pytest.raises(Exception, match="cannot be captured"):
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt:
                capture(nn.Linear(3, 2), X)


class TestSignals:
    """The process's handlers of signals are its own."""

    @pytest.fixture(autouse=True)
    def interruptible(self) -> Iterator[None]:
        former = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has it ignored
        yield
        signal.signal(signal.SIGINT, former)

    def test_handlers_are_not_replaced(self) -> None:
        seen: list[dict[int, object]] = []

        class Looks(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                seen.append({number: signal.getsignal(number) for number in signal.valid_signals()})
                return x + 1

        before = {number: signal.getsignal(number) for number in signal.valid_signals()}
        capture(Looks(), X)
        assert seen
        assert all(each == before for each in seen)

    def test_ctrl_c_interrupts(self, model: nn.Module) -> None:
        class Pressed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, x: Tensor) -> Tensor:
                y: Tensor = self.model(x)
                signal.raise_signal(signal.SIGINT)
                return y

        attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
        with pytest.raises(KeyboardInterrupt):
            capture(Pressed(), X)
        assert {name: dict(vars(module)) for name, module in model.named_modules()} == attributes
        assert capture(model, X)(X).shape == (2, 2)
