"""``linear(norm(x) * weight + bias)`` -> ``folded_linear(norm(x))``: the affine part of a layer norm or RMS norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Node

from fxopt_core import Derived, Refusal
from fxopt_norm.folding import FoldBatchNorm
from fxopt_norm.formulas import fold_affine, restore_affine
from fxopt_rewrite import (
    Editor,
    GraphIndex,
    LayerNormCall,
    LinearCall,
    Obstacle,
    ParameterisedCall,
    SitePass,
    TensorRef,
    mixed_flags_refusal,
    module_with,
    operands_of,
    owner_of,
    read_layer_norm,
    read_linear,
    same_sizes,
    sharing_refusal,
    tensor_facts,
    tensor_ref,
    tensors_refusal,
    trains,
)


@dataclass(frozen=True, eq=False)
class AffineSite:
    """A normalisation, or a product with a parameter, and the linear layers that read it.

    Attributes:
        norm: the normalisation; a plain `ParameterisedCall` for a product.
        layers: the linear layers.
    """

    norm: ParameterisedCall
    layers: tuple[LinearCall, ...]

    @property
    def label(self) -> str:
        """The names of all."""
        return " + ".join([self.norm.label, *(layer.label for layer in self.layers)])

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All calls, in order."""
        return (self.norm.node, *(layer.node for layer in self.layers))

    @property
    def inputs(self) -> dict[str, TensorRef | None]:
        """The tensors of all, as `fold_affine` calls them."""
        found = {"norm_weight": self.norm.weight, "norm_bias": self.norm.bias}
        for place, layer in enumerate(self.layers):
            found |= {f"weight_{place}": layer.weight, f"bias_{place}": layer.bias}
        return found


class FoldLayerNormAffine(SitePass[AffineSite]):
    """``linear(norm(x) * weight + bias)`` -> ``folded_linear(norm(x))``, for layer norms and RMS norms.

    ``W (g * n + t) + b = (W * g) n + (W t + b)`` for each of the linear layers that read the norm: W is
    (out_features, in_features), g and t are (in_features,). An RMS norm that is written out ends in such a product with
    a parameter, and is folded, too. Refused if anything but linear layers reads the norm, in train mode, and for
    shared, tied or partly frozen tensors. It cannot be undone; checkpoints of the original load, and come back.

    Source:
        Ashkboos et al., SliceGPT, https://arxiv.org/abs/2401.15024, which folds the same factors.

    Cost:
        A product and a sum less in each call of a norm. A layer without bias gets one if the norm has one. The new
        weights are computed once, in float64 where the device has it. The pass is linear in the number of nodes.

    >>> model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8)).eval()
    >>> graph_module = FoldLayerNormAffine()(torch.fx.symbolic_trace(model))
    >>> [name for name, _ in graph_module.named_children()]
    ['0_normalised', '1_folded']
    """

    reasons: ClassVar[Mapping[str, str]] = {"wrong-axis": FoldBatchNorm.reasons["wrong-axis"]}
    arithmetic = (fold_affine, restore_affine)

    def match(self, index: GraphIndex) -> Iterator[AffineSite | Refusal]:
        """Yield the norms that linear layers read."""
        for node in index.nodes:
            norm = read_layer_norm(index, node) or _read_gain(index, node)
            if norm is None or (not isinstance(norm, Obstacle) and not norm.tensors):
                continue
            found = {user: read_linear(index, user) for user in node.users}
            if not any(found.values()):
                continue
            if isinstance(norm, Obstacle):
                yield Refusal(norm.site, norm.reason, f"{norm.message}; its affine part stays", (node.name,))
                continue
            yield _site(norm, found, index)

    def check(self, site: AffineSite, index: GraphIndex) -> Refusal | None:
        """Refuse train mode, other sizes and dtypes, writes, and shared, tied or partly frozen tensors."""
        calls = (site.norm, *site.layers)
        sharing = (tensors_refusal(call, index) or sharing_refusal(call, [call.node], index) for call in calls)
        return (
            _mode_refusal(site, index)
            or _fit_refusal(site, index)
            or _write_refusal(site, index)
            or next((refusal for refusal in sharing if refusal is not None), None)
            or mixed_flags_refusal(site.label, calls, index)
            or _range_refusal(site, index)
        )

    def rewrite(self, site: AffineSite, edit: Editor) -> None:
        """Normalise without the affine part, and insert layers that have it."""
        norm, value = site.norm, site.norm.input
        kept = None
        if isinstance(norm, LayerNormCall):
            full = norm.module_name or norm.node.name
            kept = edit.add_module(full, f"{full.rpartition('.')[2]}_normalised", norm.build())
            value = edit.call_module(kept, value, before=norm.node, like=[norm.node])
        tensors, names, outputs = list(_folded(site)), [], []
        for layer in site.layers:
            parameters = {"weight": nn.Parameter(tensors.pop(0), layer.weight.tensor.requires_grad)}
            if has_bias := layer.bias is not None or norm.bias is not None:
                trains_bias = any(ref.tensor.requires_grad for ref in (layer.bias, norm.bias) if ref is not None)
                parameters["bias"] = nn.Parameter(tensors.pop(0), trains_bias)
            sizes = (layer.in_features, layer.out_features)
            module = module_with(parameters, nn.Linear, *sizes, bias=has_bias).train(layer.training)
            full = layer.module_name or layer.weight.name
            names.append(edit.add_module(full, f"{full.rpartition('.')[2]}_folded", module))
            outputs += [f"{names[-1]}.{key}" for key in parameters]
            edit.replace(layer.node, edit.call_module(names[-1], value, before=layer.node, like=[layer.node]))
        edit.replace(norm.node, edit.current(value))
        edit.derived(
            Derived(
                function="fxopt_norm.formulas:fold_affine",
                inputs=tuple((key, None if ref is None else ref.name) for key, ref in site.inputs.items()),
                settings=(),
                outputs=tuple(outputs),
                restore="fxopt_norm.formulas:restore_affine",
            )
        )
        for layer, name in zip(site.layers, names, strict=True):
            edit.drop(layer, {}, twin=name)
        edit.drop(norm, {}, twin=kept or names[0])


def _read_gain(index: GraphIndex, node: Node) -> ParameterisedCall | None:
    """Read a product of a value and a parameter over its last dimension, the end of an RMS norm that is written out."""
    effect = index.effects.effect(node)
    if effect.operation != "mul" or effect.writes or effect.opaque:
        return None
    operands = operands_of(node)
    for value, factor in (operands, operands[::-1]) if len(operands) == 2 else ():
        if isinstance(value, Node) and isinstance(factor, Node) and factor.op == "get_attr":
            ref = tensor_ref(index, node, factor, "factor", parameter=True)
            if isinstance(ref, TensorRef) and ref.tensor.dim() == 1:
                owner = owner_of(ref.name)
                return ParameterisedCall(node, value, ref, None, None, owner, trains(index, node, owner))
    return None


def _site(
    norm: ParameterisedCall, found: Mapping[Node, LinearCall | Obstacle | None], index: GraphIndex
) -> AffineSite | Refusal:
    layers = []
    for user, call in found.items():
        if isinstance(call, Obstacle):
            message = f"{call.message}; the affine part of `{norm.label}` stays"
            return Refusal(call.site, call.reason, message, (norm.node.name, user.name))
        if call is None or call.input is not norm.node:
            message = f"the result of `{norm.label}` is also used at node `{user.name}`, which is no linear layer on it"
            return index.refuse(norm.label, "several-users", message, norm.node, user)
        layers.append(call)
    return AffineSite(norm, tuple(layers))


def _mode_refusal(site: AffineSite, index: GraphIndex) -> Refusal | None:
    call = next((call for call in (site.norm, *site.layers) if call.training), None)
    if call is None:
        return None
    message = f"`{call.label}` is in train mode, where weights that are folded would be trained in another way"
    return index.refuse(site.label, "training", message, *site.nodes)


def _fit_refusal(site: AffineSite, index: GraphIndex) -> Refusal | None:
    """Refuse a norm over other dimensions than the features of the layers, and tensors that do not match."""
    norm, weight, size = site.norm, site.layers[0].weight.tensor, site.layers[0].in_features
    if isinstance(norm, LayerNormCall):
        if norm.normalized_shape != (size,):
            message = f"`{norm.label}` normalises {norm.normalized_shape}, and `{site.layers[0].label}` takes ({size},)"
            return index.refuse(site.label, "wrong-axis", message, *site.nodes)
    else:
        before, after = tensor_facts(norm.input, weight), tensor_facts(norm.node, weight)
        if before is None or after is None:
            message = f"shape and dtype of `{norm.input.name}` are unknown; call infer_shapes first"
            return index.refuse(site.label, "shape-unknown", message, *site.nodes)
        if not same_sizes(before.shape, after.shape):
            message = f"`{norm.input.name}` has shape {tuple(before.shape)}, and the product {tuple(after.shape)}"
            return index.refuse(site.label, "wrong-axis", message, *site.nodes)
    for ref in site.inputs.values():
        if ref is not None and (ref.tensor.dtype, ref.tensor.device) != (weight.dtype, weight.device):
            found, expected = (f"{tensor.dtype} on {tensor.device}" for tensor in (ref.tensor, weight))
            message = f"`{ref.name}` is {found}, but the weight of `{site.layers[0].label}` is {expected}"
            return index.refuse(site.label, "dtype-mismatch", message, *site.nodes)
    return None


def _write_refusal(site: AffineSite, index: GraphIndex) -> Refusal | None:
    node, value = site.norm.node, site.norm.input
    for layer in site.layers:
        for each in (node, value):
            if index.effects.written_between(each, node, layer.node):
                message = f"`{each.name}` is written in place before `{layer.label}` reads the result"
                return index.refuse(site.label, "mutated", message, *site.nodes)
    return None


def _range_refusal(site: AffineSite, index: GraphIndex) -> Refusal | None:
    weight = site.layers[0].weight.tensor
    if weight.is_meta or all(bool(tensor.isfinite().all()) for tensor in _folded(site)):
        return None
    message = f"folding `{site.norm.label}` gives weights not finite in {weight.dtype}"
    return index.refuse(site.label, "out-of-range", message, *site.nodes)


def _folded(site: AffineSite) -> tuple[Tensor, ...]:
    """Return the new tensors: for each layer its weight, and its bias if it has one."""
    with torch.no_grad():
        return fold_affine(**{key: None if ref is None else ref.tensor for key, ref in site.inputs.items()})
