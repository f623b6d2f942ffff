"""Models stored in a dtype for which the processor has no instructions: they are computed in float32.

transformers loads models in the dtype of their files, and products in it may take a hundred times as long.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import GraphModule

from fxopt_core import Transformation


class ComputeInFloat32(Transformation):
    """Leaves a graph as it is, and has the history say that it was captured in float32.

    Args:
        stored: the dtype of the weights before.
    """

    preserves_computation = True

    def __init__(self, *, stored: str) -> None:
        self.stored = stored

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Return the graph module."""
        return graph_module


def slow_dtype(model: nn.Module) -> ComputeInFloat32 | None:
    """Return what notes the dtype of a model's weights if it is slow on this processor; None where there is none.

    >>> slow_dtype(nn.Linear(2, 2))
    """
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    if isinstance(model, GraphModule) or not all(tensor.is_cpu for tensor in tensors):
        return None
    native = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    for dtype in {tensor.dtype for tensor in tensors} & native.keys():
        if not native[dtype]():
            return ComputeInFloat32(stored=str(dtype).removeprefix("torch."))
    return None
