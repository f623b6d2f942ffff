"""Ways to see which way a call of a captured module goes, and calls that all go the long way."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from torch.fx import GraphModule

from fxopt_capture.arguments import InputBinding
from fxopt_capture.direct_plan import PATIENCE


def functions_called(function: Callable[[], object]) -> list[CodeType]:
    """Return the code of the Python functions that a call of `function` calls, itself left out."""
    found: list[CodeType] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            found.append(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return found[1:]


def goes_directly(graph_module: GraphModule, *args: object, **kwargs: object) -> bool:
    """Whether a call does without the binding of arguments, the tenth time."""
    for _ in range(PATIENCE + 1):
        graph_module(*args, **kwargs)
    return InputBinding.__call__.__code__ not in functions_called(lambda: graph_module(*args, **kwargs))


def the_long_way(graph_module: GraphModule) -> GraphModule:
    """Return a copy that computes the same, and whose calls all go the long way: a hook looks on."""
    twin = copy.deepcopy(graph_module)
    twin.register_forward_hook(_look)
    return twin


def _look(module: object, args: object, output: object) -> None:
    """Do nothing."""


def outcome(graph_module: GraphModule, args: Any, kwargs: Any) -> object:
    """Return what a call gives: an output, or the type and message of what it raises."""
    try:
        return graph_module(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)
