"""``conv(x, weight_norm(v, g))`` -> ``conv(x, weight)``: weights computed from weights alone become parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt_core import Derived, Refusal
from fxopt_rewrite import Editor, GraphIndex, SitePass, replacement_refusal, words
from fxopt_simplify.purity import CallSite
from fxopt_simplify.shape_tables import MOST_BYTES, program_of, program_text
from fxopt_simplify.tables_pass import Tables, graph_of

_LAYERS = words("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution linear")


def computed_weight(*, graph: str, **tensors: Tensor) -> tuple[Tensor]:
    """Return what a graph, as text, computes from tensors in their order."""
    return (program_of(graph)(*tensors.values()),)


@dataclass(frozen=True, eq=False)
class WeightSite(CallSite):
    """A weight that a layer reads, at the node that gives it, and what computes it.

    Attributes:
        region: the nodes that compute it, in order.
        inputs: the nodes of the parameters and buffers.
    """

    region: tuple[Node, ...]
    inputs: tuple[Node, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The full names of the parameters and buffers."""
        return tuple(str(node.target) for node in self.inputs)


# Not reversible, because keeping the originals would take twice the memory. The new weight is a parameter, because
# other passes accept only parameters as weights of layers.
class FoldWeights(SitePass[WeightSite]):
    """``conv(x, weight_norm(v, g))`` -> ``conv(x, weight)``: weights computed from weights alone become parameters.

    Covers weight norm, spectral norm, standardised weights, ``W + B @ A`` of LoRA and a weight times a constant, where
    a linear layer or a convolution reads the result, and nothing else reads what it is computed from. The others are
    left to `CacheShapeTables`. The new weight has the bits that the graph computes. Refused in training mode, and where
    some of the tensors are frozen and some trainable. The pass cannot be undone; checkpoints of the original load.

    Source:
        Constant folding (Aho, Lam, Sethi, Ullman: Compilers, 8.5.4), and for weight norm
        `remove_parametrizations` of ``torch.nn.utils.parametrize``.

    Cost:
        No call computes the weight any more. It takes the place of the tensors that it is computed from, and at most
        the larger of their memory and 16 MiB. The pass is linear in the number of nodes, and computes each weight once.

    >>> class Scaled(nn.Linear):
    ...     def forward(self, x):
    ...         return nn.functional.linear(x, self.weight * 0.5, self.bias)
    >>> graph_module = torch.fx.symbolic_trace(Scaled(2, 2).eval())
    >>> print(FoldWeights()(graph_module).code.strip())
    def forward(self, x):
        weight_folded_weight = self.weight_folded.weight
        bias = self.bias
        linear = torch._C._nn.linear(x, weight_folded_weight, bias);  x = weight_folded_weight = bias = None
        return linear
    """

    arithmetic = (computed_weight,)

    def match(self, index: GraphIndex) -> Iterator[WeightSite | Refusal]:
        """Yield the weights of layers that only parameters determine."""
        tables = Tables(index, takes_sizes=False, elementwise=True)
        for output in tables.outputs():
            weight = output.node
            is_weight = any(_is_weight_of(weight, user, index) for user in weight.users)
            if not is_weight or not tables.weight_kind(weight)[0]:
                continue
            region = tables.region((weight,))
            inside = {*region}
            values = (value for node in region for value in node.all_input_nodes if value not in inside)
            site = WeightSite(weight, region, tuple(dict.fromkeys(values)))
            alone = all(user in inside for node in region[:-1] for user in node.users)
            # A layer in the region may also be called elsewhere.
            if alone and all(node.op != "call_module" for node in region) and _are_own(site, index):
                yield site

    def check(self, site: WeightSite, index: GraphIndex) -> Refusal | None:
        """Refuse weights that train, are returned or written, and tensors of which some are frozen."""
        if index.in_train_mode:
            message = f"weight `{site.label}` is computed from parameters that train"
            return index.refuse(site.label, "training", message, site.node)
        parameters = [each for each in _tensors(site, index) if isinstance(each[1], nn.Parameter)]
        trains = {tensor.requires_grad: name for name, tensor in reversed(parameters)}
        if len(trains) > 1:
            message = f"`{trains[False]}` is frozen and `{trains[True]}` is trainable; one tensor cannot be both"
            return index.refuse(site.label, "mixed-requires-grad", message, site.node)
        return replacement_refusal(site.label, site.node, index)

    def rewrite(self, site: WeightSite, edit: Editor) -> None:
        """Compute the weight, and let its readers have it as a parameter."""
        text = program_text(graph_of(site.region, site.inputs, (site.node,)))
        tensors = [tensor for _, tensor in _tensors(site, edit.index)]
        given = {f"input_{place}": tensor.detach() for place, tensor in enumerate(tensors)}
        with torch.no_grad():
            (value,) = computed_weight(graph=text, **given)
            value = value.clone()  # it may be a view
        trains = any(tensor.requires_grad for tensor in tensors)
        # A module, since the editor adds no single parameters.
        holder = nn.Module()
        holder.weight = nn.Parameter(value, requires_grad=trains)
        alike = (name for name, tensor in zip(site.names, tensors, strict=True) if tensor.shape == value.shape)
        first = next(alike, site.names[0])
        # ``layer.parametrizations.weight.original0``: the weight goes beside ``layer``. The root has no name, so the
        # new module is named after the weight.
        owner, _, parametrized = f".{first}".partition(".parametrizations.")
        owner = (owner[1:] or parametrized.partition(".")[0]) if parametrized else first.rpartition(".")[0] or first
        name = edit.add_module(owner, f"{owner.rpartition('.')[2]}_folded", holder)
        edit.replace(site.node, edit.get_attr(f"{name}.weight", before=site.node, like=[site.node]))
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


def _tensors(site: WeightSite, index: GraphIndex) -> list[tuple[str, Tensor]]:
    found = ((str(node.target), index.tensor_of(node)) for node in site.inputs)
    return [(name, tensor) for name, tensor in found if tensor is not None]


def _are_own(site: WeightSite, index: GraphIndex) -> bool:
    """Return whether a weight may take the place of its inputs.

    Checkpoints hold them, nothing else reads them, and the weight takes no more memory than they do together, or only
    little.
    """
    for name, tensor in _tensors(site, index):
        owner, _, key = name.rpartition(".")
        if key in index.modules[owner]._non_persistent_buffers_set or index.is_tied(tensor):
            return False
        if any(reader not in site.region for reader in index.readers(tensor)):
            return False
    tensors = [tensor for _, tensor in _tensors(site, index)]
    program = GraphModule(nn.Module(), graph_of(site.region, site.inputs, (site.node,)))
    try:
        with torch.no_grad():
            value = program(*(tensor.detach().to("meta") for tensor in tensors))
    except Exception:  # what an operator without a kernel for meta tensors raises
        return False
    return bool(value.nbytes <= max(MOST_BYTES, sum(tensor.nbytes for tensor in tensors)))
