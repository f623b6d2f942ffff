"""What is no graph module and no option is a typed error that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from fxopt_core import (
    LintAndRecompile,
    PassOptionError,
    PreconditionError,
    Transformation,
    faithful_copy,
    history,
    undo,
)
from fxopt_rewrite import GraphIndex, infer_shapes


class Times(Transformation):
    """A pass with an option."""

    def __init__(self, *, count: int = 1) -> None:
        self.count = count

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


MODULE: Any = nn.Linear(2, 2)
CALLS: dict[str, Callable[[], object]] = {
    "history": lambda: history(MODULE),
    "infer_shapes": lambda: infer_shapes(MODULE, torch.zeros(1, 2)),
    "faithful_copy": lambda: faithful_copy(MODULE),
    "get_transformed_nodes": lambda: LintAndRecompile().get_transformed_nodes(MODULE),
    "GraphIndex": lambda: GraphIndex(MODULE),
    "undo": lambda: undo(MODULE),
    "pass `lint-and-recompile`": lambda: LintAndRecompile()(MODULE),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_module_in_place_of_a_graph_module(name: str) -> None:
    with pytest.raises(PreconditionError, match=f"{name} is given a Linear.*capture the model first"):
        CALLS[name]()


def traced() -> GraphModule:
    """Return a graph module."""
    return torch.fx.symbolic_trace(nn.ReLU())


def test_a_graph_module_in_place_of_options() -> None:
    make: Any = Times
    with pytest.raises(PassOptionError, match=r"write Times\(\)\(graph_module\)"):
        make(traced())
