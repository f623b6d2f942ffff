"""``linear(x) * c`` -> ``ScaledLinear(x)``, with a layer of this distribution's own.

The plugin's hook ``fxopt_layers`` offers the layer, so that archives hold it like one of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fxopt_attention.scaling import ScaleSite, scale_sites, site_refusal
from fxopt_core import Refusal
from fxopt_rewrite import Editor, GraphIndex, Piece, ReversibleSitePass, bare_module


class ScaledLinear(nn.Linear):
    """``linear(x) * factor`` in one operation, where the input is a matrix and there is a bias.

    >>> x, layer = torch.ones(2, 4), ScaledLinear(4, 3, factor=0.5)
    >>> torch.allclose(layer(x), nn.functional.linear(x, layer.weight, layer.bias) * 0.5)
    True
    """

    def __init__(self, in_features: int, out_features: int, *, factor: float, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self.factor = factor

    def forward(self, input: Tensor) -> Tensor:
        """Return the scaled product, (..., out) for (..., in)."""
        bias: Tensor | None = self.bias
        if bias is None or input.dim() != 2:
            return nn.functional.linear(input, self.weight, bias) * self.factor
        return torch.addmm(bias, input, self.weight.t(), beta=self.factor, alpha=self.factor)

    def extra_repr(self) -> str:
        """Return the sizes and the factor."""
        return f"{super().extra_repr()}, factor={self.factor}"


class FuseQueryScale(ReversibleSitePass[ScaleSite]):
    """``linear(x) * c`` -> ``ScaledLinear(x)``, for a Python number ``c``: the layer multiplies by it.

    Other than with `FoldQueryScale`, the weights stay as they are, so that undoing gives them back.

    Source:
        ``torch.addmm`` computes ``beta * b + alpha * (x @ W.T)``.

    Cost:
        One operation less in each call on matrices. No tensor is touched.

    >>> class Scaled(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer = nn.Linear(4, 8)
    ...     def forward(self, x):
    ...         return self.layer(x) * 0.5
    >>> FuseQueryScale()(torch.fx.symbolic_trace(Scaled())).layer_scaled
    ScaledLinear(in_features=4, out_features=8, bias=True, factor=0.5)
    """

    def match(self, index: GraphIndex) -> Iterator[ScaleSite | Refusal]:
        """Yield products of a number and what a linear layer computes."""
        return scale_sites(index)

    def check(self, site: ScaleSite, index: GraphIndex) -> Refusal | None:
        """Refuse what is read elsewhere, shared, tied or written."""
        return site_refusal(site, index)

    def rewrite(self, site: ScaleSite, edit: Editor) -> None:
        """Give the parameters to a layer with the factor, and take the old one and the product out."""
        layer, value = site.layer, site.layer.node
        refs = {key: ref for key, ref in (("weight", layer.weight), ("bias", layer.bias)) if ref is not None}
        sizes = layer.in_features, layer.out_features
        module = bare_module(ScaledLinear, *sizes, factor=site.factor, bias="bias" in refs)
        for key, ref in refs.items():
            assert isinstance(ref.tensor, nn.Parameter)  # the reader of linear layers accepts nothing else
            module.register_parameter(key, ref.tensor)
        full = layer.module_name or layer.weight.name
        name = edit.add_module(full, f"{full.rpartition('.')[2]}_scaled", module.train(layer.training))
        call = edit.call_module(name, layer.input, before=value, like=[site.product, value])
        edit.replace(site.product, call)
        edit.erase(value)
        edit.drop(layer, {ref.key: Piece(f"{name}.{key}") for key, ref in refs.items()}, twin=name)
