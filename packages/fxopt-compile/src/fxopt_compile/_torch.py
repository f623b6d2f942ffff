"""The seam to torch: the one file of fxopt-compile that names its private parts, checked at import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx import GraphModule, Node

from fxopt_core import require_torch

_C = torch._C
_OF_C = ("_len_torch_dispatch_stack", "_functorch", "_DisableAutocast", "_set_grad_enabled")
require_torch("fxopt-compile", [(_C, _OF_C), (forward_ad, ("_current_level",))])

dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
functorch_level: Callable[[], Any] = _C._functorch.peek_interpreter_stack
without_autocast: Any = _C._DisableAutocast
set_grad_enabled: Callable[..., Any] = _C._set_grad_enabled


def forward_level() -> int:
    """Return the level of forward-mode differentiation; -1 outside of it."""
    return forward_ad._current_level


def fix_numbers(graph_module: GraphModule) -> None:
    """Let dynamo trace again with constants for numbers that modules hold, if it has turned these into inputs.

    With ``dynamic=True``, it does so with all floats: the scale of attention, the eps of a norm, the rate of a dropout.
    Dynamo is told as inductor tells it; it then guards the numbers, and traces again when one of them changes. Numbers
    that are arguments stay inputs.

    Raises:
        TensorifyScalarRestartAnalysis: there are such inputs; it makes dynamo start again.
    """
    dynamo: Any = torch._dynamo  # loaded, as it is what calls a backend
    state = getattr(dynamo.symbolic_convert, "TensorifyState", None)
    restart = getattr(dynamo.exc, "TensorifyScalarRestartAnalysis", None)
    names = {name for node in graph_module.graph.find_nodes(op="placeholder") if (name := _number_of(node))}
    if state is None or restart is None or not (names := {name for name in names if not state.should_specialize(name)}):
        return
    for name in names:
        state.specialize(name)
    raise restart


def _number_of(node: Node) -> str | None:
    """Return the symbol of an input, if it is a number that a module holds."""
    source = getattr(node, "_dynamo_source", None)
    # A float comes as a tensor without dimensions; `item_memo` is the symbol that its `item()` gives.
    number = getattr(getattr(node.meta.get("example_value"), "item_memo", None), "node", None)
    name: str | None = getattr(getattr(number, "_expr", None), "name", None)
    is_argument = source is None or source.guard_source.name == "LOCAL"
    return None if is_argument or not all(user.target == "item" for user in node.users) else name
