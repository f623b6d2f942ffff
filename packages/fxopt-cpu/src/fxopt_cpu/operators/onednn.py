"""The oneDNN operators that take the place of torch's own.

`torch.ops.mkldnn._convolution_pointwise` computes a convolution and the element-wise operation after it in one call,
from weights packed into the order that the processor's kernels read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

_NEEDED = ("_convolution_pointwise", "_is_mkldnn_bf16_supported")
Unary = tuple[str, tuple[float, ...], str]
NONE: Unary = ("none", (), "")
# Activations: oneDNN's name, how many numbers they take, and their variant.
_UNARY: dict[str, tuple[str, int, str]] = {
    **{name: (name, 0, "") for name in ("none", "relu", "hardswish", "hardsigmoid", "sigmoid", "tanh")},
    "silu": ("swish", 0, ""),
    "hardtanh": ("hardtanh", 2, ""),
    "leaky_relu": ("leaky_relu", 1, ""),
    "gelu": ("gelu", 0, "none"),
    "gelu_tanh": ("gelu", 0, "tanh"),
}
#: Activations for which oneDNN turns NaN into a number: ReLU gives 0, hardsigmoid 1.
HIDE_NAN = frozenset({"relu", "hardtanh", "hardsigmoid"})
#: Activations that differ from torch's for NaN, infinity or numbers above 1e37: hardswish of 3e38 is 3e38.
ALTER_EXTREMES = HIDE_NAN | {"hardswish"}

# None where torch lacks them; `why_unsupported` keeps such layers from being packed.
CONVOLUTION: Any = getattr(getattr(torch.ops.mkldnn, "_convolution_pointwise", None), "default", None)
SUM: Any = getattr(getattr(torch.ops.mkldnn, "_convolution_pointwise", None), "binary", None)


def why_unsupported(dtype: torch.dtype, device: torch.device) -> tuple[str, str] | None:
    """Return why the operators cannot compute a layer, as (reason code, predicate of the layer), or None.

    >>> why_unsupported(torch.float64, torch.device("cpu"))
    ('unsupported-dtype', 'is torch.float64; oneDNN takes torch.float32 and torch.bfloat16')
    """
    if device.type not in ("cpu", "meta"):
        return "not-on-cpu", f"is on {device}; the oneDNN operators only run on the CPU"
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # untyped in torch
    if not (available and all(hasattr(torch.ops.mkldnn, name) for name in _NEEDED)):
        return "no-operators", "cannot be packed: this build of torch, or this processor, lacks the oneDNN operators"
    if dtype not in (torch.float32, torch.bfloat16):
        return "unsupported-dtype", f"is {dtype}; oneDNN takes torch.float32 and torch.bfloat16"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "no-operators", "is torch.bfloat16, which this processor does not support"
    return None


@cache
def unary_of(name: str, *numbers: float) -> Unary | None:
    """Return an activation as the operators take it: name, numbers and variant; None for one that they lack.

    >>> unary_of("hardtanh", 0.0, 6.0), unary_of("gelu_tanh", 0.0, 0.0), unary_of("mish")
    (('hardtanh', (0.0, 6.0), ''), ('gelu', (), 'tanh'), None)
    """
    if name not in _UNARY:
        return None
    known, count, variant = _UNARY[name]
    return known, numbers[:count], variant


def pack_convolution(
    weight: Tensor,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    shape: Sequence[int],
) -> Tensor:
    """Return the weight of a 2-D convolution in oneDNN's blocked layout, for inputs of about this shape."""
    pack: Callable[..., Tensor] = torch.ops.aten.mkldnn_reorder_conv2d_weight
    return pack(weight.detach().to_mkldnn(), padding, stride, dilation, groups, shape)
