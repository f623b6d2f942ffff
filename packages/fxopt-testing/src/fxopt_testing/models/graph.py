"""Graph modules with more in them than their graphs read, or with graph modules in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_rewrite import infer_shapes
from fxopt_testing.forms import ModuleTracer, traced_by
from fxopt_testing.models.linear import Block, Pair


class WithTable(Pair):
    """A buffer that is not saved is added to what layers return."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(4), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.q(x) * 2.0 + self.table, torch.relu(self.k(x) * 3.0)


def with_spare_parts() -> GraphModule:
    """Return a graph module with a layer, a parameter and a buffer without use, and a buffer that is not saved."""
    model = WithTable().eval()
    graph_module = traced_by(ModuleTracer(), model)
    del graph_module.table  # torch made it persistent
    graph_module.register_buffer("table", model.table, persistent=False)
    # `GraphModule` takes over only what the graph reads: other parts have to be added.
    graph_module.add_submodule("spare", nn.Linear(2, 2).eval())
    graph_module.register_parameter("unused", nn.Parameter(torch.randn(3)))
    graph_module.register_buffer("count", torch.arange(3))
    return infer_shapes(graph_module, torch.ones(3, 4))


class Outer(nn.Module):
    """Calls a graph module, and something else."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = traced_by(ModuleTracer(), Block()), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return torch.relu(self.last(self.inner(x)) * 2.0)


def nested_graphs() -> GraphModule:
    """Return a graph module that calls another one."""
    return infer_shapes(traced_by(ModuleTracer(), Outer().eval()), torch.ones(3, 4))
