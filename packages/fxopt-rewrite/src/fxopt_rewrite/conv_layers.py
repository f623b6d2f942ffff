"""What layers of any family offer that compute a convolution with what is next to it, for others to plan with."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

from torch import nn

Pair = tuple[int, int]


class FusedConvolution(Protocol):
    """A module that computes ``activation(conv2d(pad(x), weight, bias) + other)``, where ``other`` is optional.

    Attributes:
        is_fused_convolution: marks the class.
        weight: (out_channels, in_channels / groups, height, width).
        bias: (out_channels,), or None.
        padding: zeros before and after the rows, and before and after the columns.
        activation: name, numbers and variant of the activation, as oneDNN has them: ``("hardtanh", (0.0, 6.0), "")``.
    """

    is_fused_convolution: bool
    weight: nn.Parameter
    bias: nn.Parameter | None
    in_channels: int
    out_channels: int
    kernel_size: Pair
    stride: Pair
    padding: tuple[Pair, Pair]
    dilation: Pair
    groups: int
    memory_format: str

    @property
    def activation(self) -> tuple[Any, ...]:
        """The activation of the sum."""


def is_fused_convolution(module: nn.Module | None) -> TypeGuard[FusedConvolution]:
    """Return whether a module is one: ``isinstance`` with a protocol takes a hundred times as long.

    Its class says so: an attribute of the module may come from a file.
    """
    return getattr(type(module), "is_fused_convolution", False) is True
