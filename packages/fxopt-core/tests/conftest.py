"""What the tests share: a count of steps, for what has to be linear."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import pytest
from torch.fx import Node

if TYPE_CHECKING:
    from _typeshed import TraceFunction


@pytest.fixture
def steps_of() -> Callable[[Callable[[], object]], int]:
    """Count what a function does: the same on every machine, where the time it takes is not.

    Counted are lines of Python, calls, calls of built-in functions, and comparisons of nodes, such as searches of a
    list make. A copy of a list or dictionary is one step, however long.
    """

    def steps(function: Callable[[], object]) -> int:
        count = 0

        def trace(frame: FrameType, event: str, argument: object) -> TraceFunction:
            nonlocal count
            count += event == "line"
            return trace

        def profile(frame: FrameType, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        former = sys.gettrace(), sys.getprofile(), gc.isenabled()
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(Node, "__eq__", lambda self, other: self is other)  # built in, it would not be seen
            gc.disable()  # what is collected, and when, depends on what ran before
            sys.settrace(trace)
            sys.setprofile(profile)
            try:
                function()
            finally:
                sys.setprofile(former[1])
                sys.settrace(former[0])
                if former[2]:
                    gc.enable()
        return count

    return steps
