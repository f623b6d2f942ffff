"""The oneDNN operators that ship with torch: whether this build and this processor have them, and what they take.

`torch.ops.mkldnn._convolution_pointwise` and `_linear_pointwise` compute a layer, and what follows it element by
element, in one call, from weights that were brought into the order that the processor's kernels read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_NEEDED = (
    "_convolution_pointwise",
    "_convolution_pointwise_",
    "_linear_pointwise",
    "_reorder_linear_weight",
    "_is_mkldnn_bf16_supported",
)

# Where torch comes without them, nothing calls what stands here instead: `against_operators` says so first.
CONVOLUTION: Any = getattr(getattr(torch.ops.mkldnn, "_convolution_pointwise", None), "default", None)
SUM: Any = getattr(getattr(torch.ops.mkldnn, "_convolution_pointwise", None), "binary", None)
SUM_INTO: Any = getattr(getattr(torch.ops.mkldnn, "_convolution_pointwise_", None), "binary", None)
LINEAR: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


def against_operators(dtype: torch.dtype, device: torch.device) -> tuple[str, str] | None:
    """Return why the operators do not take a layer, as (reason code, predicate of the layer), or None.

    >>> against_operators(torch.float64, torch.device("cpu"))
    ('unsupported-dtype', 'is torch.float64, and the operators take torch.float32 and torch.bfloat16')
    """
    if device.type not in ("cpu", "meta"):
        return "not-on-cpu", f"is on {device}, and the operators work on the CPU"
    if not _are_available():
        return "no-operators", "stays: this build of torch, or this processor, has no oneDNN operators"
    if dtype not in (torch.float32, torch.bfloat16):
        return "unsupported-dtype", f"is {dtype}, and the operators take torch.float32 and torch.bfloat16"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "no-operators", "is torch.bfloat16, which this processor has no instructions for"
    return None


def _are_available() -> bool:
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # so it is in torch
    return available and all(hasattr(torch.ops.mkldnn, name) for name in _NEEDED)


def pack_convolution(
    weight: Tensor,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    shape: Sequence[int],
) -> Tensor:
    """Return the weight of a convolution over two dimensions in oneDNN's own order, for inputs of about this shape."""
    pack: Any = torch._C._nn.mkldnn_reorder_conv2d_weight
    packed: Tensor = pack(weight.detach().to_mkldnn(), padding, stride, dilation, groups, shape)
    return packed


def pack_linear(weight: Tensor, rows: int) -> Tensor:
    """Return the weight of a linear layer, (out, in), in oneDNN's own order, for about this many rows of input."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), rows)
    return packed
