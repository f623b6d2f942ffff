"""Capture, trace and save from several threads: one at a time runs, and the others wait."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_capture.archive.files import load, save
from fxopt_capture.capture import capture
from fxopt_capture.one_at_a_time import one_at_a_time
from fxopt_capture.tracing import symbolic_trace

X = torch.linspace(-1, 1, 8).reshape(2, 4)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).eval()


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Return what so many threads get that begin together."""
    ready = threading.Barrier(count)

    def begin(number: int) -> Any:
        ready.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


def test_all_doors_at_once(tmp_path: Path) -> None:
    """Capture, both kinds of trace, and save with load share one lock."""
    model = layers()
    expected = model(X)

    def saved(number: int) -> GraphModule:
        save(capture(model, X), tmp_path / f"{number}.fxopt")
        return load(tmp_path / f"{number}.fxopt")

    doors: list[Callable[[int], GraphModule]] = [
        lambda _: capture(model, X),
        lambda _: symbolic_trace(model),
        lambda _: symbolic_trace(model, example_inputs=X),
        saved,
    ]
    for graph_module in at_once(len(doors), lambda number: doors[number](number)):
        torch.testing.assert_close(graph_module(X), expected)


def test_a_capture_within_a_capture() -> None:
    """A model that captures another one when it is first called does not wait for itself."""

    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layers()
            self.keys: list[str] = []

        def forward(self, x: Tensor) -> Tensor:
            with one_at_a_time():
                return torch.as_tensor(self.inner(x))

    model = Lazy().eval()
    torch.testing.assert_close(capture(model, X)(X), model(X))


def test_an_error_lets_the_next_one_in() -> None:
    """The lock is free after a capture that fails."""
    outcomes = at_once(2, lambda number: _failure() if number else capture(layers(), X))
    assert isinstance(outcomes[0], GraphModule)
    assert "reduction dim" in outcomes[1]


def _failure() -> str:
    with pytest.raises(Exception, match="cannot be captured") as caught:
        capture(layers(), torch.ones(2, 5))
    return str(caught.value)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Let another thread capture, as it were, until the end of the block."""
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with one_at_a_time():
            taken.set()
            done.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait(30)
    try:
        yield
    finally:
        done.set()
        holder.join()


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C does not end a wait there")
def test_a_wait_can_be_interrupted() -> None:
    """Ctrl-C in the main thread does not wait for another thread to finish."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    try:
        with held(), pytest.raises(KeyboardInterrupt):
            timer.start()
            capture(layers(), X)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, former)
    assert isinstance(capture(layers(), X), GraphModule)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_process_does_not_inherit_a_wait() -> None:
    """A process that is forked while another thread captures has a lock of its own."""
    with held():
        child = os.fork()
        if not child:
            signal.alarm(10)
            with one_at_a_time():
                os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
