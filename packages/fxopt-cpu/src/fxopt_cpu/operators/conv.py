"""`fxopt::conv`: `activation(convolution(input) + bias + residual)` of images that have their channels last in memory.

The weight (out, in of a group, height, width) lies in panels (panels, taps * in, 16), as in `fxopt::linear`, with
separate panels for each group; the weight of a depthwise convolution, with 1, 2, 4 or 8 features for each channel, lies
in rows (taps, padded features). A tap is one place of the kernel.

An int8 weight has the panels, scales and sums of an int8 linear layer with taps * in columns. Images are rounded to
integers too: each with its own scale, from its largest magnitude, or each channel by `rounding` (2, in).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fxopt_cpu.operators.definition import Operator
from fxopt_cpu.operators.linear import LARGEST, PANEL, activate, pack, unpack

Sizes = Sequence[int]
LEAST_NUMBER = 1e-30  # as in csrc/conv.cpp: the least that counts as the largest of an image


class Window(NamedTuple):
    """A window that moves over images.

    Attributes:
        kernel: its rows and columns.
        stride: by how many of them it moves.
        padding: zeros before and after the rows, and before and after the columns.
        dilation: how far apart its places are.
    """

    kernel: Sizes
    stride: Sizes = (1, 1)
    padding: Sizes = (0, 0, 0, 0)
    dilation: Sizes = (1, 1)


def result_sizes(lengths: Sizes, window: Window) -> list[int]:
    """Return how many rows and columns a window gives.

    >>> result_sizes((9, 9), Window((3, 3), (2, 2), (1, 1, 0, 0)))
    [5, 4]
    """
    sides = zip(window.padding[::2], window.padding[1::2], strict=True)
    settings = zip(lengths, sides, window.kernel, window.stride, window.dilation, strict=True)
    return [(size + sum(pad) - apart * (width - 1) - 1) // step + 1 for size, pad, width, step, apart in settings]


def pack_convolution(weight: Tensor, groups: int = 1) -> Tensor:
    """Return the panels of a weight (out, in of a group, height, width).

    >>> weight = torch.randn(40, 4, 3, 3)
    >>> panels = pack_convolution(weight, groups=2)
    >>> panels.shape, torch.equal(unpack_convolution(panels, weight.shape, groups=2), weight)
    (torch.Size([4, 36, 16]), True)
    """
    features, channels = weight.shape[:2]
    if is_depthwise(features, channels, groups):
        # (features, 1, height, width) -> (taps, features), with features padded to whole panels
        return F.pad(weight.flatten(1).t(), (0, -features % PANEL)).contiguous()
    # (out, in, height, width) -> (out, taps * in), the order of elements in a window of channels-last images
    rows = weight.permute(0, 2, 3, 1).flatten(1)
    if groups > 1:  # no shared panels: NaN of one group, times the zeros between them, would reach the others
        of_group = rows.view(groups, features // groups, rows.shape[1])
        rows = F.pad(of_group, (0, 0, 0, -(features // groups) % PANEL)).flatten(0, 1)
    return pack(rows)


def unpack_convolution(panels: Tensor, shape: Sequence[int], groups: int = 1) -> Tensor:
    """Return the weight of this shape that was packed, bit for bit."""
    features, channels, height, width = shape
    if is_depthwise(features, channels, groups):
        return panels[:, :features].t().reshape(features, 1, height, width)
    padded, depth = len(panels) * PANEL if groups > 1 else features, height * width * channels
    rows = unpack(panels, padded, depth).view(groups, padded // groups, depth)[:, : features // groups]
    return rows.reshape(features, height, width, channels).permute(0, 3, 1, 2)


def is_depthwise(features: int, channels: int, groups: int) -> bool:
    """Return whether a convolution, with so many channels in a group, is computed channel by channel."""
    return groups > 1 and channels == 1 and features // groups in (1, 2, 4, 8)


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
    scale: Tensor | None = None,
    sums: Tensor | None = None,
    rounding: Tensor | None = None,
) -> Tensor:
    """Compute the convolution with torch's operators."""
    weight = unpack_convolution(panels, (features, input.shape[1] // groups, *kernel), groups).to(input.dtype)
    top, bottom, left, right = padding
    padded = F.pad(input, (left, right, top, bottom))
    settings = tuple(stride), 0, tuple(dilation), groups
    if scale is None:
        value = F.conv2d(padded, weight, bias, *settings)
    else:
        weight = weight * scale[:features].to(input.dtype).view(-1, 1, 1, 1)
        # The scale comes from finite numbers only: one NaN must not spoil the windows that do not read it.
        finite = padded.isfinite()
        numbers = padded.where(finite, 0.0)
        if rounding is None:
            largest = numbers.flatten(1).abs().amax(1) if numbers[0:1].numel() else numbers.new_zeros(len(numbers))
            factor, shift = (LARGEST / largest.clamp_min(LEAST_NUMBER)).view(-1, 1, 1, 1), 0.0
            rounded = (numbers * factor).round() / factor
        else:
            factor, shift = rounding.to(input.dtype).view(2, -1, 1, 1)
            # Not divided by `factor`, since the weight already is; unrounded pixels are multiplied by it instead.
            rounded = (numbers * factor + shift).round().clamp(-LARGEST, LARGEST) - shift
            padded = padded * factor
        value = F.conv2d(rounded, weight, bias, *settings)
        # Windows with NaN or infinity are multiplied unrounded, as in float32.
        reads = F.conv2d((~finite).any(1, keepdim=True).to(input.dtype), input.new_ones(1, 1, *kernel), None, *settings)
        value = F.conv2d(padded, weight, bias, *settings).where(reads > 0, value)
    value = value if residual is None else value + residual
    return activate(value, activation, alpha, beta).contiguous(memory_format=torch.channels_last)


CONV = Operator(
    "conv(Tensor input, Tensor panels, Tensor? bias, int features, int[] kernel, int[] stride, int[] padding,"
    " int[] dilation, int groups, int activation, float alpha, float beta, Tensor? residual, Tensor? scale=None,"
    " Tensor? sums=None, Tensor? rounding=None) -> Tensor",
    _reference,
)
