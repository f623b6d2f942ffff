"""``batch_norm(conv(x))`` -> ``folded_conv(x)``: batch norm behind convolutions."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from torch.fx import Node

from fxopt_core import ConvolutionCall, GraphIndex, Obstacle, read_convolution
from fxopt_norm.folding import FoldBatchNorm


class _FoldInConvolution(FoldBatchNorm):
    """Folds into plain convolutions over a number of dimensions, or into transposed ones over any."""

    dims: ClassVar[tuple[int, ...]]
    transposed: ClassVar[bool] = False
    classes: ClassVar[tuple[type[nn.Module], ...]]

    def read_layer(self, index: GraphIndex, node: Node) -> ConvolutionCall | Obstacle | None:
        """Read a convolution of the kind that this pass folds into."""
        call = read_convolution(index, node)
        if isinstance(call, Obstacle):
            module = index.module_of(node)
            mine = self._is_mine(node) if module is None else isinstance(module, self.classes)
            return call if mine else None
        if call is None or call.dims not in self.dims or call.transposed != self.transposed:
            return None
        return call

    def _is_mine(self, node: Node) -> bool:
        """Return whether a function that cannot be read is, by its name, a convolution of this kind."""
        name = str(getattr(node.target, "__name__", ""))
        of_these_dims = any(f"{dims}d" in name for dims in self.dims)
        return "convolution" in name or (of_these_dims and ("transpose" in name) == self.transposed)


class FuseBatchNorm2dInConv2d(_FoldInConvolution):
    """``batch_norm(conv2d(x))`` -> ``folded_conv2d(x)``, for batch norm that uses its running statistics.

    With ``s = weight / sqrt(var + eps)`` over the output channels, the new weight is ``s * W`` and the new bias
    ``s * (b - mean) + bias``. Refused in train mode, where the convolution's result is used elsewhere, and for shared,
    tied or partly frozen tensors. It cannot be undone.

    Source:
        Ioffe and Szegedy, Batch Normalization, https://arxiv.org/abs/1502.03167, section 3.1: with its running
        statistics, batch norm is an affine map of each channel.

    Cost:
        One operation less in each call. The tensors of the batch norm go, and a layer without bias gets one. The new
        weights are computed once, in float64 where the device has it, else in float32, one layer at a time. The pass is
        linear in the number of nodes.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    >>> graph_module = FuseBatchNorm2dInConv2d()(torch.fx.symbolic_trace(model))
    >>> [name for name, _ in graph_module.named_children()]
    ['0_folded']
    """

    dims = (2,)
    classes = (nn.Conv2d,)


class FuseBatchNorm1dInConv1d(_FoldInConvolution):
    """``batch_norm(conv1d(x))`` -> ``folded_conv1d(x)``; needs known shapes, since conv1d takes unbatched input too.

    With ``s = weight / sqrt(var + eps)`` over the output channels, the new weight is ``s * W`` and the new bias
    ``s * (b - mean) + bias``. It cannot be undone.

    Source:
        Ioffe and Szegedy, Batch Normalization, https://arxiv.org/abs/1502.03167, section 3.1: with its running
        statistics, batch norm is an affine map of each channel.

    Cost:
        One operation less in each call. The tensors of the batch norm go, and a layer without bias gets one. The new
        weights are computed once, in float64 where the device has it, else in float32, one layer at a time. The pass is
        linear in the number of nodes.

    >>> import torch
    >>> from fxopt_core import infer_shapes
    >>> model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8)).eval()
    >>> graph_module = infer_shapes(torch.fx.symbolic_trace(model), torch.zeros(2, 3, 9))
    >>> [name for name, _ in FuseBatchNorm1dInConv1d()(graph_module).named_children()]
    ['0_folded']
    """

    dims = (1,)
    classes = (nn.Conv1d,)


class FuseBatchNorm3dInConv3d(_FoldInConvolution):
    """``batch_norm(conv3d(x))`` -> ``folded_conv3d(x)``.

    With ``s = weight / sqrt(var + eps)`` over the output channels, the new weight is ``s * W`` and the new bias
    ``s * (b - mean) + bias``. It cannot be undone.

    Source:
        Ioffe and Szegedy, Batch Normalization, https://arxiv.org/abs/1502.03167, section 3.1: with its running
        statistics, batch norm is an affine map of each channel.

    Cost:
        One operation less in each call. The tensors of the batch norm go, and a layer without bias gets one. The new
        weights are computed once, in float64 where the device has it, else in float32, one layer at a time. The pass is
        linear in the number of nodes.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv3d(1, 4, 3), nn.BatchNorm3d(4)).eval()
    >>> graph_module = FuseBatchNorm3dInConv3d()(torch.fx.symbolic_trace(model))
    >>> [name for name, _ in graph_module.named_children()]
    ['0_folded']
    """

    dims = (3,)
    classes = (nn.Conv3d,)


class FuseBatchNormInConvTranspose(_FoldInConvolution):
    """``batch_norm(conv_transpose(x))`` -> ``folded_conv_transpose(x)``, over 1, 2 or 3 dimensions.

    With ``s = weight / sqrt(var + eps)`` over the output channels, which are spread over the groups of a transposed
    convolution, the new weight is ``s * W`` and the new bias ``s * (b - mean) + bias``. It cannot be undone.

    Source:
        Ioffe and Szegedy, Batch Normalization, https://arxiv.org/abs/1502.03167, section 3.1: with its running
        statistics, batch norm is an affine map of each channel.

    Cost:
        One operation less in each call. The tensors of the batch norm go, and a layer without bias gets one. The new
        weights are computed once, in float64 where the device has it, else in float32, one layer at a time. The pass is
        linear in the number of nodes.

    >>> import torch
    >>> model = nn.Sequential(nn.ConvTranspose2d(4, 8, 2, stride=2), nn.BatchNorm2d(8)).eval()
    >>> graph_module = FuseBatchNormInConvTranspose()(torch.fx.symbolic_trace(model))
    >>> [name for name, _ in graph_module.named_children()]
    ['0_folded']
    """

    dims = (1, 2, 3)
    transposed = True
    classes = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
