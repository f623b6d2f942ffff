"""``x @ W.T + b`` -> ``pad(x, 1) @ [W | b].T``: the bias becomes a column of the weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from fxopt_core import Refusal
from fxopt_rewrite import (
    Editor,
    GraphIndex,
    LinearCall,
    Obstacle,
    Piece,
    ReversibleSitePass,
    mixed_flags_refusal,
    module_with,
    read_linear,
    sharing_refusal,
    tensors_refusal,
)


@dataclass(frozen=True, eq=False)
class BiasedLinear:
    """A linear layer with bias, and all its calls."""

    calls: tuple[LinearCall, ...]

    @property
    def label(self) -> str:
        """The name of the layer."""
        return self.calls[0].label

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All calls."""
        return tuple(call.node for call in self.calls)


class FuseBiasInLinear(ReversibleSitePass[BiasedLinear]):
    """``x @ W.T + b`` -> ``pad(x, 1) @ [W | b].T``: the bias becomes a column of the weight.

    ``x`` is (..., in_features), the new weight is (out_features, in_features + 1). This is a compatibility pass for
    runtimes whose matrix products take no bias; by itself it makes nothing faster.

    Source:
        Homogeneous coordinates: an affine map is a linear map of the input with a one appended.

    Cost:
        One more column in each product, and a copy of each input to append the ones. The pass copies each weight once,
        one layer at a time. It is linear in the number of nodes.

    >>> graph_module = FuseBiasInLinear()(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 8))))
    >>> print(graph_module.code.strip())
    def forward(self, input):
        input_1 = input
        pad = torch.nn.functional.pad(input_1, (0, 1), 'constant', 1.0);  input_1 = None
        _0_with_bias = getattr(self, "0_with_bias")(pad);  pad = None
        return _0_with_bias
    >>> getattr(graph_module, "0_with_bias")
    Linear(in_features=5, out_features=8, bias=False)
    """

    def match(self, index: GraphIndex) -> Iterator[BiasedLinear | Refusal]:
        """Yield the layers with bias."""
        calls: dict[tuple[int, int, int, bool], list[LinearCall]] = {}
        for node in index.nodes:
            call = read_linear(index, node, transposed=True)
            if isinstance(call, Obstacle):
                yield Refusal(call.site, call.reason, f"{call.message}; it stays as it is", (node.name,))
            elif call is not None and call.bias is not None:
                key = id(call.weight.tensor), id(call.bias.tensor), id(call.module), call.transposed
                calls.setdefault(key, []).append(call)
        for mine in calls.values():
            yield BiasedLinear(tuple(mine))

    def check(self, site: BiasedLinear, index: GraphIndex) -> Refusal | None:
        """Refuse shared, tied, mutated and partly frozen tensors."""
        first = site.calls[0]
        refusal = tensors_refusal(first, index) or sharing_refusal(first, site.nodes, index)
        if refusal is not None:
            return refusal
        assert first.bias is not None
        weight, bias = first.weight.tensor, first.bias.tensor
        if weight.dtype != bias.dtype or weight.device != bias.device:
            found, other_found = (f"{tensor.dtype} on {tensor.device}" for tensor in (weight, bias))
            message = f"the weight of linear `{site.label}` is {found}, but its bias {other_found}"
            return index.refuse(site.label, "dtype-mismatch", message, *site.nodes)
        return mixed_flags_refusal(site.label, [first], index)

    def rewrite(self, site: BiasedLinear, edit: Editor) -> None:
        """Insert a layer without bias whose input has a column of ones."""
        call = site.calls[0]
        assert call.bias is not None
        full = call.module_name or call.weight.name
        name = edit.add_module(full, f"{full.rpartition('.')[2]}_with_bias", _widened(call))
        for each in site.calls:
            node, value, width = each.node, each.input, call.in_features + 1
            # Padding gives the ones the dtype and device of the input, whichever it has at run time.
            arguments = (value, (0, 1), "constant", 1.0)
            padded = edit.call_function(F.pad, *arguments, before=node, like=[node], value_of=value, last_dim=width)
            edit.replace(node, edit.call_module(name, padded, before=node, like=[node]))
        pieces: dict[str, Piece | None] = {
            call.weight.name: Piece(f"{name}.weight", ((1, 0, call.in_features),), transposed=call.transposed),
            call.bias.name: Piece(f"{name}.weight", ((1, call.in_features, 1),), squeeze=1),
        }
        edit.drop(call, pieces, twin=name)


def _widened(call: LinearCall) -> nn.Linear:
    """Return a layer whose weight is ``[W | b]``, of shape (out_features, in_features + 1)."""
    assert call.bias is not None
    weight, bias = call.weight.tensor, call.bias.tensor
    with torch.no_grad():
        widened = torch.cat([call.matrix, bias.detach().unsqueeze(1)], dim=1)
    widened = nn.Parameter(widened, requires_grad=weight.requires_grad)
    module = module_with({"weight": widened}, nn.Linear, call.in_features + 1, call.out_features, bias=False)
    return module.train(call.training)
