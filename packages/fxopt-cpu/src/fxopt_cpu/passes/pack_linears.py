"""``activation(x @ W.T + b)`` -> ``packed(x)``: one call of oneDNN's operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from fxopt_core import Refusal
from fxopt_cpu.layers.activations import Activation
from fxopt_cpu.layers.packed_layer import insert_packed, packing_refusal
from fxopt_cpu.layers.packed_linear import PackedLinear
from fxopt_cpu.operators.onednn import OPERATOR_REASONS
from fxopt_cpu.passes.neighbours import activation_after
from fxopt_rewrite import Editor, GraphIndex, LinearCall, Obstacle, ReversibleSitePass, read_linear


@dataclass(frozen=True, eq=False)
class LinearSite:
    """A linear layer and the activation after it.

    Attributes:
        call: the linear layer.
        last: the node whose value the packed module computes.
        activation: the activation at the end.
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

    The activations are those of `PackConvolutions`, if nothing else reads the product. Parameters are unchanged:
    `PackedLinear` packs a copy when it first runs.

    Source:
        ``torch.ops.mkldnn._linear_pointwise``, which inductor calls on CPUs, too: oneDNN applies the
        element-wise operation before it writes the result.

    Cost:
        One call instead of several, and no tensors between them. From the first call on, the module holds a packed
        copy of the weight besides the parameter. ReLU, hardtanh, hardsigmoid and hardswish are calls of their own, in
        place: oneDNN's hide NaN, or lose infinity. With AVX2 alone, so are GELU, SiLU and tanh, and torch computes
        products of 64 rows and more whose result is not wider than the input: both are faster there.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU()).eval()
    >>> PackLinears()(torch.fx.symbolic_trace(model)).get_submodule("0_packed")
    PackedLinear(in_features=4, out_features=8, bias=True, activation=gelu(none))
    """

    reasons = OPERATOR_REASONS

    def match(self, index: GraphIndex) -> Iterator[LinearSite | Refusal]:
        """Yield the linear layers."""
        for node in index.nodes:
            call = read_linear(index, node)
            if isinstance(call, Obstacle):
                yield Refusal(call.site, call.reason, f"{call.message}; it stays as it is", (node.name,))
            elif call is not None:
                yield LinearSite(call, *activation_after(index, node))

    def check(self, site: LinearSite, index: GraphIndex) -> Refusal | None:
        """Refuse what oneDNN cannot compute, and shared, tied or mutated tensors."""
        return packing_refusal(site.call, "linear", index)

    def rewrite(self, site: LinearSite, edit: Editor) -> None:
        """Insert one module with the same parameters, and drop what it replaces."""
        call, activation = site.call, site.activation
        features, bias = (call.in_features, call.out_features), call.bias is not None
        module = PackedLinear(*features, bias=bias, activation=activation, device="meta")
        insert_packed(edit, module, call, site.nodes, [call.input], before=call.node)
