"""``batch_norm(conv(x))`` -> ``folded_conv(x)``: batch norm after convolutions."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from torch.fx import Node

from fxopt_norm.folding import FoldBatchNorm
from fxopt_rewrite import ConvolutionCall, GraphIndex, Obstacle, read_convolution


class _FoldInConvolution(FoldBatchNorm):
    """``batch_norm(conv(x))`` -> ``folded_conv(x)``, for convolutions over ``dims`` dimensions, plain or transposed."""

    dims: ClassVar[tuple[int, ...]]
    transposed: ClassVar[bool] = False
    classes: ClassVar[tuple[type[nn.Module], ...]]

    def read_layer(self, index: GraphIndex, node: Node) -> ConvolutionCall | Obstacle | None:
        """Read a convolution that this pass folds into."""
        call = read_convolution(index, node)
        if isinstance(call, Obstacle):
            # Only one pass reports a layer that cannot be read: the one for its kind.
            module = index.module_of(node)
            mine = self._looks_like_mine(node) if module is None else isinstance(module, self.classes)
            return call if mine else None
        if call is None or call.dims not in self.dims or call.transposed != self.transposed:
            return None
        return call

    def _looks_like_mine(self, node: Node) -> bool:
        """Return whether a function that cannot be read is such a convolution by its name."""
        name = str(getattr(node.target, "__name__", ""))
        of_these_dims = any(f"{dims}d" in name for dims in self.dims)
        return "convolution" in name or (of_these_dims and ("transpose" in name) == self.transposed)


class FuseBatchNorm2dInConv2d(_FoldInConvolution):
    """``batch_norm(conv2d(x))`` -> ``folded_conv2d(x)``, for batch norm that uses its running statistics.

    With ``s = weight / sqrt(var + eps)`` over the output channels, the new weight is ``s * W`` and the new bias
    ``s * (b - mean) + bias``. Refused in train mode, if something else uses the result of the convolution, and for
    shared, tied or partly frozen tensors.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    >>> graph_module = FuseBatchNorm2dInConv2d()(torch.fx.symbolic_trace(model))
    >>> print(graph_module.code.strip())
    def forward(self, input):
        input_1 = input
        _0_folded = getattr(self, "0_folded")(input_1);  input_1 = None
        return _0_folded
    """

    dims = (2,)
    classes = (nn.Conv2d,)


class FuseBatchNorm1dInConv1d(_FoldInConvolution):
    """``batch_norm(conv1d(x))`` -> ``folded_conv1d(x)``; needs known shapes, since conv1d also takes unbatched input.

    >>> import torch
    >>> from fxopt_rewrite import infer_shapes
    >>> model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8)).eval()
    >>> graph_module = infer_shapes(torch.fx.symbolic_trace(model), torch.zeros(2, 3, 9))
    >>> print(FuseBatchNorm1dInConv1d()(graph_module).code.strip())
    def forward(self, input):
        input_1 = input
        _0_folded = getattr(self, "0_folded")(input_1);  input_1 = None
        return _0_folded
    """

    dims = (1,)
    classes = (nn.Conv1d,)


class FuseBatchNorm3dInConv3d(_FoldInConvolution):
    """``batch_norm(conv3d(x))`` -> ``folded_conv3d(x)``.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv3d(1, 4, 3), nn.BatchNorm3d(4)).eval()
    >>> graph_module = FuseBatchNorm3dInConv3d()(torch.fx.symbolic_trace(model))
    >>> print(graph_module.code.strip())
    def forward(self, input):
        input_1 = input
        _0_folded = getattr(self, "0_folded")(input_1);  input_1 = None
        return _0_folded
    """

    dims = (3,)
    classes = (nn.Conv3d,)


class FuseBatchNormInConvTranspose(_FoldInConvolution):
    """``batch_norm(conv_transpose(x))`` -> ``folded_conv_transpose(x)``, over 1, 2 or 3 dimensions.

    >>> import torch
    >>> model = nn.Sequential(nn.ConvTranspose2d(4, 8, 2, stride=2), nn.BatchNorm2d(8)).eval()
    >>> graph_module = FuseBatchNormInConvTranspose()(torch.fx.symbolic_trace(model))
    >>> print(graph_module.code.strip())
    def forward(self, input):
        input_1 = input
        _0_folded = getattr(self, "0_folded")(input_1);  input_1 = None
        return _0_folded
    """

    dims = (1, 2, 3)
    transposed = True
    classes = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
