"""``batch_norm(linear(x))`` and ``linear(batch_norm(x))`` -> ``folded_linear(x)``."""

from __future__ import annotations

from torch.fx import Node

from fxopt_norm.folding import FoldBatchNorm
from fxopt_rewrite import GraphIndex, LinearCall, Obstacle, read_linear


class FuseBatchNorm1dInLinear(FoldBatchNorm):
    """``batch_norm(linear(x))`` and ``linear(batch_norm(x))`` -> ``folded_linear(x)``, on 2-D values.

    With ``s = weight / sqrt(var + eps)`` and ``t = bias - s * mean``: after the layer, the new weight is
    ``s[:, None] * W`` and the new bias ``s * b + t``; before it, they are ``W * s`` and ``W @ t + b``. On 3-D values,
    batch norm works on dimension 1 and the layer on the last one, so those are refused, and so are values of unknown
    rank (call ``infer_shapes`` first). A view after the layer that only joins the other dimensions does no harm: with
    ``y = linear(x)``, ``batch_norm(y.flatten(0, 1)).reshape_as(y)``, as in LeViT, becomes ``folded_linear(x)``.

    >>> import torch
    >>> from fxopt_rewrite import infer_shapes
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)).eval()
    >>> graph_module = infer_shapes(torch.fx.symbolic_trace(model), torch.zeros(2, 4))
    >>> print(FuseBatchNorm1dInLinear()(graph_module).code.strip())
    def forward(self, input):
        input_1 = input
        _0_folded = getattr(self, "0_folded")(input_1);  input_1 = None
        return _0_folded
    """

    norm_may_come_first = True

    def read_layer(self, index: GraphIndex, node: Node) -> LinearCall | Obstacle | None:
        """Read a linear layer."""
        return read_linear(index, node)
