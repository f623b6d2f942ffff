"""A model and a pass that another process finds by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_core import ReversibleTransformation, iter_nodes

aten = torch.ops.aten


@dataclasses.dataclass
class Halves:
    """Two tensors, as input and as output."""

    left: Tensor
    right: Tensor


class Varied(nn.Module):
    """Has ties, buffers of both kinds, a mode, and dataclasses around its tensors."""

    hidden: Tensor
    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.register_buffer("offset", torch.arange(4.0))
        self.register_buffer("hidden", torch.ones(4), persistent=False)

    def forward(self, halves: Halves, mask: Tensor | None = None) -> Any:
        x = self.norm(self.first(halves.left)) + self.offset
        return Halves(self.tied(x) * self.hidden, x + halves.right)


class AddToSub(ReversibleTransformation):
    """``x + y`` -> ``x - y``, which the outputs show."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in iter_nodes(graph_module.graph):
            if node.target is aten.add.Tensor:
                node.target = aten.sub.Tensor
                self.mark_as_transformed(node)
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        for node in self.get_transformed_nodes(graph_module):
            node.target = aten.add.Tensor
            self.mark_as_restored(node)
        return graph_module


def halves(batch: int, size: int = 4) -> Halves:
    """Return inputs that are the same in every process."""
    return Halves(torch.arange(batch * size * 1.0).reshape(batch, size), torch.ones(batch, size))
