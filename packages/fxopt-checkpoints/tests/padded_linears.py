"""A pass that pads linear layers, and a model for it: some rows of its new tensors belong to no original."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from site_passes import LinearSite
from torch import Tensor, nn

from fxopt_core import Refusal
from fxopt_rewrite import (
    Editor,
    GraphIndex,
    LinearCall,
    Piece,
    ReversibleSitePass,
    read_linear,
    sharing_refusal,
    tensors_refusal,
)


class PadOutputs(ReversibleSitePass[LinearSite]):
    """``linear(x)`` -> ``narrow(padded_linear(x))``: output features become a multiple of 8."""

    start = 0  # where the old rows are said to be

    def match(self, index: GraphIndex) -> Iterator[LinearSite]:
        for node in index.nodes:
            call = read_linear(index, node)
            if isinstance(call, LinearCall) and call.bias is None and call.out_features % 8:
                yield LinearSite(call)

    def check(self, site: LinearSite, index: GraphIndex) -> Refusal | None:
        return tensors_refusal(site.call, index) or sharing_refusal(site.call, site.nodes, index)

    def rewrite(self, site: LinearSite, edit: Editor) -> None:
        call, rows = site.call, site.call.out_features
        total = -(-rows // 8) * 8
        weight = call.weight.tensor.detach()
        module = nn.Linear(call.in_features, total, bias=False, device="meta").train(call.training)
        padded = torch.cat([weight, weight.new_zeros(total - rows, call.in_features)])
        module.weight = nn.Parameter(padded, requires_grad=call.weight.tensor.requires_grad)
        name = edit.add_module(call.label, "padded", module)
        product = edit.call_module(name, call.input, before=call.node, like=[call.node], last_dim=total)
        result = edit.call_function(torch.narrow, product, -1, 0, rows, before=call.node, like=[call.node])
        edit.replace(call.node, result)
        edit.drop(call, {call.weight.key: Piece(f"{name}.weight", ((0, self.start, rows),))}, twin=name)


class Perceptron(nn.Module):
    """Layers that `PadOutputs` takes, and one that it leaves alone."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, 6, bias=False)
        self.block = nn.Sequential(nn.Linear(6, 6, bias=False), nn.ReLU(), nn.Linear(6, 5))

    def forward(self, x: Tensor) -> Any:
        return self.block(self.first(x) / 3)
