"""``conv(x, weight_norm(v, g))`` -> ``conv(x, weight)``: weights computed from weights alone become parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import Node

from fxopt_core import Derived, Refusal
from fxopt_rewrite import Editor, GraphIndex, SitePass, replacement_refusal, words
from fxopt_simplify.shape_tables import MOST_BYTES, program_of, program_text
from fxopt_simplify.tables_pass import Tables, graph_of

_LAYERS = words("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution linear")


def computed_weight(*, graph: str, **tensors: Tensor) -> tuple[Tensor]:
    """Return what a graph, as text, computes from tensors in their order."""
    return (program_of(graph)(*tensors.values()),)


@dataclass(frozen=True, eq=False)
class WeightSite:
    """A weight that a layer reads, and what computes it.

    Attributes:
        weight: the node that gives it.
        region: the nodes that compute it, in order.
        inputs: the nodes of the parameters and buffers.
        names: their full names.
    """

    weight: Node
    region: tuple[Node, ...]
    inputs: tuple[Node, ...]
    names: tuple[str, ...]

    @property
    def label(self) -> str:
        """The name of the weight's node."""
        return self.weight.name

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The node whose value the layer reads."""
        return (self.weight,)


class FoldWeights(SitePass[WeightSite]):
    """``conv(x, weight_norm(v, g))`` -> ``conv(x, weight)``: weights computed from weights alone become parameters.

    So it is with weight norm, spectral norm, standardised weights, ``W + B @ A`` of LoRA and a weight times a constant,
    where a linear layer or a convolution reads the result, and nothing else reads what it is made of. The others are
    left to `CacheShapeTables`. The new weight has the bits that the graph computes. The pass cannot be undone.

    Source:
        Constant folding (Aho, Lam, Sethi, Ullman: Compilers, 8.5.4), and for weight norm
        `remove_parametrizations` of ``torch.nn.utils.parametrize``.

    Cost:
        The computation goes from each call. The new weight takes the place of the tensors that it is computed from, and
        is as large as they are together, or 16 MiB, at most. The pass is linear in the number of nodes, and computes
        each weight once.

    >>> class Scaled(nn.Linear):
    ...     def forward(self, x):
    ...         return nn.functional.linear(x, self.weight * 0.5, self.bias)
    >>> graph_module = torch.fx.symbolic_trace(Scaled(2, 2))
    >>> print(FoldWeights()(graph_module).code.strip())
    def forward(self, x):
        weight_folded_weight = self.weight_folded.weight
        bias = self.bias
        linear = torch._C._nn.linear(x, weight_folded_weight, bias);  x = weight_folded_weight = bias = None
        return linear
    """

    arithmetic = (computed_weight,)

    def match(self, index: GraphIndex) -> Iterator[WeightSite | Refusal]:
        """Yield the weights of layers that parameters alone decide."""
        tables = Tables(index, takes_sizes=False, elementwise=True)
        for output in tables.outputs():
            weight = output.node
            if not tables.weight_kind(weight)[0] or not any(
                _is_weight_of(weight, user, index) for user in weight.users
            ):
                continue
            region = tables.region((weight,))
            if any(node.op == "call_module" for node in region):  # a layer, which others call too
                continue
            inside = {*region}
            inputs = tuple(
                dict.fromkeys(value for node in region for value in node.all_input_nodes if value not in inside)
            )
            alone = all(user in inside for node in region[:-1] for user in node.users) and _is_small(
                weight, inputs, index
            )
            if alone and _are_own(inputs, inside, index) and replacement_refusal(weight.name, weight, index) is None:
                yield WeightSite(weight, region, inputs, tuple(str(node.target) for node in inputs))

    def rewrite(self, site: WeightSite, edit: Editor) -> None:
        """Compute the weight, and let its readers have it as a parameter."""
        text = program_text(graph_of(site.region, site.inputs, (site.weight,)))
        tensors = [tensor for node in site.inputs if (tensor := edit.index.tensor_of(node)) is not None]
        given = {f"input_{place}": tensor.detach() for place, tensor in enumerate(tensors)}
        with torch.inference_mode(False), torch.no_grad():
            (value,) = computed_weight(graph=text, **given)
            value = value.clone()  # it may be a view
        trains = any(tensor.requires_grad for tensor in tensors)
        holder = nn.Module()
        holder.weight = nn.Parameter(value, requires_grad=trains)
        alike = (name for name, tensor in zip(site.names, tensors, strict=True) if tensor.shape == value.shape)
        first = next(alike, site.names[0])
        owner, _, parametrized = f".{first}".partition(".parametrizations.")
        owner = (owner[1:] or parametrized.partition(".")[0]) if parametrized else first.rpartition(".")[0] or first
        name = edit.add_module(owner, f"{owner.rpartition('.')[2]}_folded", holder)
        parameter = edit.get_attr(f"{name}.weight", before=site.weight, like=[site.weight])
        edit.replace(site.weight, parameter)
        for node in reversed(site.region[:-1]):
            edit.erase(node)
        inputs = tuple((f"input_{place}", name) for place, name in enumerate(site.names))
        function = f"{computed_weight.__module__}:{computed_weight.__name__}"
        edit.derived(Derived(function, inputs, (("graph", text),), (f"{name}.weight",)))
        for each in dict.fromkeys(site.names):
            edit.drop_tensor(each, None)


def _is_weight_of(value: Node, user: Node, index: GraphIndex) -> bool:
    """Return whether a call of a layer reads a value as its weight or bias, and not as its input."""
    operands = (*user.args[1:3], user.kwargs.get("weight"), user.kwargs.get("bias"))
    return index.effects.effect(user).operation in _LAYERS and value in operands and value not in user.args[:1]


def _are_own(inputs: tuple[Node, ...], region: set[Node], index: GraphIndex) -> bool:
    """Return whether checkpoints hold what a weight is computed from, and nothing else reads it, so that it may go."""
    for node in inputs:
        owner, _, key = str(node.target).rpartition(".")
        tensor = index.tensor_of(node)
        if tensor is None or key in index.modules[owner]._non_persistent_buffers_set or index.is_tied(tensor):
            return False
        if any(reader not in region for reader in index.readers(tensor)):
            return False
    return True


def _is_small(weight: Node, inputs: tuple[Node, ...], index: GraphIndex) -> bool:
    """Return whether a weight takes no more memory than its inputs together, or little."""
    facts = weight.meta.get("val")
    if not isinstance(facts, Tensor):
        return True
    if not all(type(size) is int for size in facts.shape):
        return False
    tensors = [index.tensor_of(node) for node in inputs]
    return facts.numel() * facts.element_size() <= max(
        MOST_BYTES, sum(tensor.nbytes for tensor in tensors if tensor is not None)
    )
