"""`fxopt::conv`: `activation(convolution(input) + bias + residual)` of images that have their channels last in memory.

A dense convolution has its weight (out, in, height, width) in panels (panels, taps * in, 16), as in `fxopt::linear`;
a depthwise one in rows (taps, padded channels). A tap is one place of the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fxopt_cpu.operators.definition import Operator
from fxopt_cpu.operators.linear import PANEL, activate, pack, unpack


def pack_convolution(weight: Tensor) -> Tensor:
    """Return the panels of a dense weight (out, in, height, width).

    >>> weight = torch.randn(20, 3, 5, 5)
    >>> panels = pack_convolution(weight)
    >>> panels.shape, torch.equal(unpack_convolution(panels, 20, 3, (5, 5)), weight)
    (torch.Size([2, 75, 16]), True)
    """
    return pack(weight.permute(0, 2, 3, 1).flatten(1))


def unpack_convolution(panels: Tensor, features: int, channels: int, kernel: Sequence[int]) -> Tensor:
    """Return the dense weight that was packed, bit for bit."""
    height, width = kernel
    return (
        unpack(panels, features, height * width * channels).view(features, height, width, channels).permute(0, 3, 1, 2)
    )


def pack_depthwise(weight: Tensor) -> Tensor:
    """Return the rows of a depthwise weight (channels, 1, height, width), one for each tap.

    >>> weight = torch.randn(20, 1, 3, 3)
    >>> rows = pack_depthwise(weight)
    >>> rows.shape, torch.equal(unpack_depthwise(rows, 20, (3, 3)), weight)
    (torch.Size([9, 32]), True)
    """
    return F.pad(weight.flatten(1).t(), (0, -len(weight) % PANEL)).contiguous()


def unpack_depthwise(rows: Tensor, channels: int, kernel: Sequence[int]) -> Tensor:
    """Return the depthwise weight that was packed, bit for bit."""
    return rows[:, :channels].t().reshape(channels, 1, *kernel)


def _reference(
    input: Tensor,
    panels: Tensor,
    bias: Tensor | None,
    features: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: int,
    alpha: float,
    beta: float,
    residual: Tensor | None,
) -> Tensor:
    """Compute the convolution by torch's operators."""
    if groups > 1:
        weight = unpack_depthwise(panels, features, kernel)
    else:
        weight = unpack_convolution(panels, features, input.shape[1], kernel)
    top, bottom, left, right = padding
    padded = F.pad(input, (left, right, top, bottom))
    value = F.conv2d(padded, weight.to(input.dtype), bias, tuple(stride), 0, tuple(dilation), groups)
    value = value if residual is None else value + residual
    return activate(value, activation, alpha, beta).contiguous(memory_format=torch.channels_last)


def _fake(
    input: Tensor,
    panels: Tensor,
    bias: Tensor | None,
    features: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *rest: object,
) -> Tensor:
    sizes = [
        (input.shape[2 + i] + padding[2 * i] + padding[2 * i + 1] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1
        for i in range(2)
    ]
    return input.new_empty(input.shape[0], features, *sizes).to(memory_format=torch.channels_last)


CONV = Operator(
    "conv(Tensor input, Tensor panels, Tensor? bias, int features, int[] kernel, int[] stride, int[] padding,"
    " int[] dilation, int groups, int activation, float alpha, float beta, Tensor? residual) -> Tensor",
    _fake,
    _reference,
)
