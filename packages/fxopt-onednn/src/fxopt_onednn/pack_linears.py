"""``activation(x @ W.T + b)`` -> ``packed(x)``: one call of oneDNN's operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from fxopt_core import (
    Editor,
    GraphIndex,
    LinearCall,
    Obstacle,
    Piece,
    Refusal,
    ReversibleSitePass,
    read_linear,
    sharing_refusal,
    tensors_refusal,
)
from fxopt_onednn.activations import Activation
from fxopt_onednn.dropping import drop_unused
from fxopt_onednn.following import activation_behind
from fxopt_onednn.operators import against_operators
from fxopt_onednn.packed_linear import PackedLinear
from fxopt_onednn.packing import as_parameter


@dataclass(frozen=True, eq=False)
class LinearSite:
    """A linear layer with the activation behind it.

    Attributes:
        call: the linear layer.
        last: the node whose value is computed.
        activation: what is applied at the end.
    """

    call: LinearCall
    last: Node
    activation: Activation

    @property
    def label(self) -> str:
        """The name of the layer."""
        return self.call.label

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The calls, in order."""
        return tuple(dict.fromkeys((self.call.node, self.last)))


class PackLinears(ReversibleSitePass[LinearSite]):
    """``activation(x @ W.T + b)`` -> ``packed(x)``: one call of oneDNN's operator.

    The same activations go along as in `PackConvolutions`, where nothing else reads the product. Parameters stay what
    they are; `PackedLinear` packs a copy when it first runs.

    Source:
        ``torch.ops.mkldnn._linear_pointwise``, which inductor calls for CPUs as well: oneDNN applies what follows
        a layer to each element before it is written.

    Cost:
        One call in place of several, and no tensor between them. The packed copy of the weight is held beside the
        parameter from the first call on.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU()).eval()
    >>> PackLinears()(torch.fx.symbolic_trace(model)).get_submodule("0_packed")
    PackedLinear(in_features=4, out_features=8, bias=True, activation=gelu(none))
    """

    def match(self, index: GraphIndex) -> Iterator[LinearSite | Refusal]:
        """Yield the linear layers."""
        for node in index.nodes:
            call = read_linear(index, node)
            if isinstance(call, Obstacle):
                yield Refusal(call.site, call.reason, f"{call.message}; it stays as it is", (node.name,))
            elif call is not None:
                yield LinearSite(call, *activation_behind(index, node))

    def check(self, site: LinearSite, index: GraphIndex) -> Refusal | None:
        """Refuse what the operators do not take, and what is shared, tied or mutated."""
        call, weight = site.call, site.call.weight.tensor
        against = against_operators(weight.dtype, weight.device)
        if against is not None:
            return index.refuse(site.label, against[0], f"linear `{site.label}` {against[1]}", call.node)
        return tensors_refusal(call, index) or sharing_refusal(call, [call.node], index)

    def rewrite(self, site: LinearSite, edit: Editor) -> None:
        """Put in one module with the same parameters, and take out what it stands for."""
        call = site.call
        full = call.module_name or call.weight.name
        name = edit.add_module(full, f"{full.rpartition('.')[2]}_packed", _packed(site))
        packed = edit.call_module(name, call.input, before=call.node, like=site.nodes[::-1])
        edit.replace(site.last, packed)
        if site.last is not call.node:
            edit.erase(call.node)
        refs = {"weight": call.weight, "bias": call.bias}
        pieces: dict[str, Piece | None] = {
            ref.key: Piece(f"{name}.{key}") for key, ref in refs.items() if ref is not None
        }
        edit.drop(call, pieces, twin=name)
        if site.last is not call.node and site.last.op == "call_module":
            drop_unused(edit, str(site.last.target))


def _packed(site: LinearSite) -> PackedLinear:
    """Return the module for a site, with the parameters of the layer."""
    call = site.call
    module = PackedLinear(
        call.in_features,
        call.out_features,
        bias=call.bias is not None,
        activation=site.activation,
        device="meta",
    )
    for key, ref in (("weight", call.weight), ("bias", call.bias)):
        if ref is not None:
            module.register_parameter(key, as_parameter(ref))
    return module.train(call.training)
