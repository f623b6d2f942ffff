"""Records say whether a pass changed anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import Transformation, history


class Odd(nn.Module):
    """Ties, an absent bias, a module of two names, buffers of both kinds, an inference tensor, a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.again = nn.Sequential(self.second, nn.BatchNorm1d(2))
        self.lazy = nn.LazyLinear(3)
        self.register_buffer("table", torch.ones(2), persistent=False)
        with torch.inference_mode():
            self.constant = nn.Buffer(torch.ones(2))
        self.again[1].weight.requires_grad_(False)
        self.missing: nn.Module | None
        self.register_module("missing", None)


CHANGES: dict[str, Callable[[GraphModule], object]] = {
    "a write": lambda module: torch.nn.init.zeros_(module.get_parameter("first.weight")),
    "a flag": lambda module: module.get_parameter("first.weight").requires_grad_(False),
    "a dtype": lambda module: module.get_submodule("second").double(),
    "a mode": lambda module: module.get_submodule("second").eval(),
    "a module": lambda module: setattr(module, "second", nn.Linear(2, 2)),
    "a tensor": lambda module: setattr(module.get_submodule("first"), "weight", nn.Parameter(torch.ones(2, 2))),
    "a deletion": lambda module: delattr(module.get_submodule("first"), "weight"),
    "a new module": lambda module: setattr(module, "unused", nn.ReLU()),
    "a target": lambda module: setattr(list(module.graph.nodes)[1], "target", "second"),
    "a name": lambda module: setattr(list(module.graph.nodes)[1], "name", "renamed"),
    "a node": lambda module: module.graph.call_function(torch.relu, (next(iter(module.graph.nodes)),)),
}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x))


@pytest.mark.parametrize("change", [*CHANGES.values(), None], ids=[*CHANGES, "nothing"])
def test_the_record_of_a_pass_says_whether_it_changed_anything(change: Callable[[GraphModule], object] | None) -> None:
    class Changing(Transformation):
        def transform(self, graph_module: GraphModule) -> GraphModule:
            if change is not None:
                change(graph_module)
            return graph_module

    graph_module = symbolic_trace(Two())
    graph_module.add_module("odd", Odd())
    Changing()(graph_module, lint_and_recompile=False)
    (record,) = history(graph_module)
    assert record.changed == (change is not None)
    assert change is not None or not record.rekeyed
