"""`count_steps`: what a function does, counted: the same on every machine, where the time it takes is not."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest import mock

from torch.fx import Node
from torch.fx.graph import _node_list


def profiler() -> Any:
    """Return the profiler that is active; None for cProfile, which cannot be begun again."""
    active = sys.getprofile()
    return active if callable(active) else None


class Steps:
    """A count of lines of Python, calls, calls of built-in functions, and comparisons of nodes.

    A walk over all nodes that nothing but built-in functions sees, such as ``list(graph.nodes)``, counts as many steps
    as there are nodes; another copy of a list or dictionary is one step, however long.
    """

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what happens inside."""
        former = sys.gettrace(), profiler(), gc.isenabled()
        walk: Any = _node_list.__iter__

        def walked(nodes: Any) -> Any:
            self.count += len(nodes)
            return walk(nodes)

        with (
            mock.patch.object(Node, "__eq__", lambda self, other: self is other),  # built in, it would not be seen
            mock.patch.object(_node_list, "__iter__", walked),
        ):
            gc.disable()  # what is collected, and when, depends on what ran before
            sys.settrace(self._trace)
            sys.setprofile(self._profile)
            try:
                yield
            finally:
                sys.setprofile(former[1])
                sys.settrace(former[0])
                if former[2]:
                    gc.enable()

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        self.count += event == "line"
        return self._trace

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        self.count += event in ("call", "c_call")


def count_steps(function: Callable[[], object]) -> int:
    """Return how many steps a function takes; see `Steps`.

    >>> count_steps(lambda: [str(n) for n in range(100)]) - count_steps(lambda: [str(n) for n in range(50)]) >= 50
    True
    """
    steps = Steps()
    with steps.counting():
        function()
    return steps.count
