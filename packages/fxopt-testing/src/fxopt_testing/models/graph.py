"""Models that are graph modules already, with more in them than their graphs read, or with graphs inside of graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_rewrite import infer_shapes
from fxopt_testing.forms import ModuleTracer, traced_by
from fxopt_testing.models.linear import Pair


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
    graph_module.add_submodule("spare", nn.Linear(2, 2).eval())
    graph_module.register_parameter("unused", nn.Parameter(torch.randn(3)))
    graph_module.register_buffer("count", torch.arange(3))
    return infer_shapes(graph_module, torch.ones(3, 4))


class Inner(nn.Module):
    """A layer and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * x


class Outer(nn.Module):
    """Calls a graph module, and something else."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = traced_by(ModuleTracer(), Inner())
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return torch.relu(self.last(self.inner(x)) * 2.0)


class OuterTracer(ModuleTracer):
    """Leaves graph modules whole."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a call of a module is one node."""
        return isinstance(m, GraphModule) or super().is_leaf_module(m, module_qualified_name)


def nested_graphs() -> GraphModule:
    """Return a graph module that calls another one."""
    model = Outer().eval()
    graph_module = traced_by(OuterTracer(), model)
    return infer_shapes(graph_module, torch.ones(3, 4))
