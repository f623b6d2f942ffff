"""Models and a pass for the tests of archives."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_capture import load, save
from fxopt_core import iter_nodes


class Varied(nn.Module):
    """Ties, unused parameters, an alias, buffers of both kinds, a plain tensor, frozen parts, layers called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.alias = self.frozen
        self.norm = nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(2)])
        self.unused = nn.Conv2d(1, 1, 1)
        self.scale = nn.Parameter(torch.full((4,), 3.0))
        self.register_buffer("offset", torch.arange(4.0))
        self.register_buffer("hidden", torch.full((4,), 0.5), persistent=False)
        self.constant = torch.full((4,), 2.0)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Any:
        x = self.embedding(ids) * self.scale + self.offset
        for block in self.blocks:
            x = self.frozen(block(x)) * self.hidden
        if mask is not None:
            x = x * mask[..., None]
        x = self.norm(x.transpose(1, 2)).transpose(1, 2) + self.constant
        with torch.no_grad():
            steps = x * 2
        return {"logits": self.head(x), "states": (x, steps)}


class Square(nn.Module):
    """Multiplies what its inputs hold; branches on sizes and takes a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, pair: dict[str, Tensor], rest: list[Tensor], *, negate: bool = False) -> Any:
        x = self.linear(pair["left"]) @ pair["right"]
        x = x + rest[0] if rest[0].shape[0] <= 16 else x
        return (-x if negate else x), rest[1]


def in_every_form(captured: GraphModule, folder: Path) -> list[GraphModule]:
    """Return a captured module, copied, pickled and out of an archive."""
    save(captured, folder / "model.fxopt")
    return [captured, copy.deepcopy(captured), pickle.loads(pickle.dumps(captured)), load(folder / "model.fxopt")]


def layout(graph_module: GraphModule) -> list[tuple[object, ...]]:
    """Return all that a graph consists of, node by node, by names."""
    return [
        (node.op, node.name, str(node.target), str(node.args), str(node.kwargs), {user.name for user in node.users})
        for node in iter_nodes(graph_module.graph)
    ]


def modules(graph_module: nn.Module) -> dict[str, str]:
    """Return what every module is, by name."""
    return {name: repr(module) for name, module in graph_module.named_modules() if name and not module._modules}
