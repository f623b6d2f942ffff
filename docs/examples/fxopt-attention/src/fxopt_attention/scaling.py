"""``linear(x) * c`` -> ``scaled_linear(x)``."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import Node

from fxopt_core import Derived, Refusal
from fxopt_rewrite import (
    Editor,
    GraphIndex,
    LinearCall,
    Obstacle,
    SitePass,
    bare_module,
    read_linear,
    sharing_refusal,
    tensors_refusal,
)

PRODUCTS = (operator.mul, torch.mul, torch.multiply, torch.ops.aten.mul.Tensor)


@dataclass(frozen=True, eq=False)
class ScaleSite:
    """A linear layer, and the product of what it computes with a number."""

    layer: LinearCall
    product: Node
    factor: float

    @property
    def label(self) -> str:
        """The names of both."""
        return f"{self.layer.label} * {self.factor}"

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Both calls."""
        return (self.layer.node, self.product)


def scaled(weight: Tensor, bias: Tensor | None, *, factor: float) -> tuple[Tensor, Tensor | None]:
    """Return both tensors times a factor; low precision is rounded once."""

    def times(tensor: Tensor) -> Tensor:
        wide = torch.promote_types(tensor.dtype, torch.float32)
        return (tensor.detach().to(wide) * factor).to(tensor.dtype)

    return times(weight), None if bias is None else times(bias)


def unscaled(
    weight: Tensor, bias: Tensor | None, *, factor: float, shapes: Mapping[str, Sequence[int] | None]
) -> dict[str, Tensor]:
    """Return tensors from which `scaled` computes the same again, up to rounding."""
    original = scaled(weight, bias, factor=1 / factor)
    return {key: tensor for key, tensor in zip(("weight", "bias"), original, strict=True) if tensor is not None}


class FoldQueryScale(SitePass[ScaleSite]):
    """``linear(x) * c`` -> ``scaled_linear(x)``, for a Python number ``c``: weight and bias are multiplied by it.

    Put `ChangeTrueDivToMulByInverse` before it, so that divisions by a number are products; and `MergeLinears` behind.
    The factor cannot be divided out again bit for bit, so that the pass is not reversible; checkpoints go both ways.

    Source:
        A linear map times a number is linear: ``(x @ W.T + b) * c == x @ (c * W).T + c * b``.

    Cost:
        One operation less in each call. The pass copies the weight and bias of each layer once.

    >>> from fxopt_core import history
    >>> class Scaled(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer = nn.Linear(4, 8)
    ...     def forward(self, x):
    ...         return self.layer(x) * 0.5
    >>> graph_module = FoldQueryScale()(torch.fx.symbolic_trace(Scaled()))
    >>> history(graph_module)[-1].rewrites[0].modules_after
    ('layer_scaled',)
    """

    repeats = True
    arithmetic = (scaled, unscaled)

    def match(self, index: GraphIndex) -> Iterator[ScaleSite | Refusal]:
        """Yield products of a number and what a linear layer computes."""
        return scale_sites(index)

    def check(self, site: ScaleSite, index: GraphIndex) -> Refusal | None:
        """Refuse what is read elsewhere, shared, tied or written, and factors that weights cannot take."""
        layer = site.layer
        refusal = site_refusal(site, index)
        if refusal is None and not can_take(layer, site.factor):
            message = (
                f"the weight of `{layer.label}` cannot take the factor {site.factor} in {layer.weight.tensor.dtype}"
            )
            return index.refuse(site.label, "out-of-range", message, *site.nodes)
        return refusal

    def rewrite(self, site: ScaleSite, edit: Editor) -> None:
        """Put in a layer with new tensors, and take the old one and the product out."""
        layer, value = site.layer, site.layer.node
        module = bare_module(nn.Linear, layer.in_features, layer.out_features, bias=layer.bias is not None)
        refs = {"weight": layer.weight, "bias": layer.bias}
        new = scaled(layer.weight.tensor, layer.bias.tensor if layer.bias else None, factor=site.factor)
        for (key, ref), tensor in zip(refs.items(), new, strict=True):
            if ref is not None and tensor is not None:
                module.register_parameter(key, nn.Parameter(tensor, requires_grad=ref.tensor.requires_grad))
        full = layer.module_name or layer.weight.name
        name = edit.add_module(full, f"{full.rpartition('.')[2]}_scaled", module.train(layer.training))
        call = edit.call_module(name, layer.input, before=value, like=[site.product, value])
        edit.replace(site.product, call)
        edit.erase(value)
        edit.derived(
            Derived(
                function="fxopt_attention.scaling:scaled",
                inputs=tuple((key, ref.name if ref else None) for key, ref in refs.items()),
                settings=(("factor", site.factor),),
                outputs=tuple(f"{name}.{key}" if ref else None for key, ref in refs.items()),
                restore="fxopt_attention.scaling:unscaled",
            )
        )
        edit.drop(layer, {}, twin=name)


def scale_sites(index: GraphIndex) -> Iterator[ScaleSite | Refusal]:
    """Yield products of a number and what a linear layer computes."""
    for node in index.nodes:
        for value, factor in scaled_value(node):
            layer = read_linear(index, value)
            if isinstance(layer, LinearCall):
                yield ScaleSite(layer, node, factor)
            elif isinstance(layer, Obstacle):
                yield index.refuse(layer.site, layer.reason, layer.message, node)


def site_refusal(site: ScaleSite, index: GraphIndex) -> Refusal | None:
    """Refuse what is read elsewhere, shared, tied or written."""
    layer, value = site.layer, site.layer.node
    other = next((user for user in value.users if user is not site.product), None)
    if other is not None:
        message = f"what `{layer.label}` computes is also read at node `{other.name}`, without the factor"
        return index.refuse(site.label, "several-users", message, *site.nodes)
    if index.effects.written_between(value, value, site.product):
        message = f"what `{layer.label}` computes is written in place before node `{site.product.name}` reads it"
        return index.refuse(site.label, "mutated", message, *site.nodes)
    return tensors_refusal(layer, index) or sharing_refusal(layer, [value], index)


def scaled_value(node: Node) -> Iterator[tuple[Node, float]]:
    """Yield the value and the number that a node multiplies, in either order."""
    is_product = node.op == "call_function" and node.target in PRODUCTS
    if not is_product and not (node.op == "call_method" and node.target in ("mul", "multiply")):
        return
    if len(node.args) != 2 or node.kwargs:
        return
    for value, factor in (node.args, node.args[::-1]):
        if isinstance(value, Node) and isinstance(factor, (int, float)) and not isinstance(factor, bool):
            yield value, float(factor)


def can_take(layer: LinearCall, factor: float) -> bool:
    """Return whether all weights stay finite, and none but zeros becomes zero."""
    weight = layer.weight.tensor.detach()
    if not weight.is_floating_point() or not math.isfinite(factor) or factor == 0:
        return False
    if weight.is_meta:
        return True
    bias = layer.bias.tensor.detach() if layer.bias else None
    pairs = zip((weight, bias), scaled(weight, bias, factor=factor), strict=True)
    return all(torch.equal(_numbers(old), _numbers(new)) for old, new in pairs if old is not None and new is not None)


def _numbers(tensor: Tensor) -> Tensor:
    return tensor.isfinite() & (tensor != 0)
