"""`QuantizedConv2d` and `QuantizedConv1d`: convolution with an int8 weight, sum and activation in one operator."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from fxopt_cpu.layers.epilogue import CODES
from fxopt_cpu.layers.packed_conv import PackedConv2d, window_of
from fxopt_cpu.operators.definition import without_gradient
from fxopt_rewrite import is_plain_tensor, needs_gradient, runs_plainly

CONV = without_gradient(torch.ops.fxopt.conv.default)
_FLOAT = torch.float32


class QuantizedConv2d(PackedConv2d):
    """``activation(conv2d(pad(x), weight * scale, bias) + other)`` of integers; ``other`` is optional.

    ``x`` is (N, in_channels, H, W) in float32 and rounded to integers at each call: each image in steps of its own,
    from its largest magnitude, or each channel by a buffer ``rounding`` (2, in_channels), ``x * factor + shift``. The
    buffers ``weight`` (out_channels, in_channels, height, width) in int8 and ``scale`` (out_channels,) are packed by
    the first call without gradients, as `PanelLinear` packs its weight. Windows with NaN or infinity are
    multiplied unrounded, as in float32. Settings are those of `PackedConv2d`, with one group.

    Args:
        in_channels: number of channels of the input.
        out_channels: number of channels of the result.
        kernel_size: height and width of the kernel.
        rounding: whether inputs are rounded by factors and shifts.
        device: where the tensors are.
        settings: the other settings of `PackedConv2d`.

    >>> conv = QuantizedConv2d(1, 1, (1, 1), bias=False, activation=("relu",))
    >>> _ = conv.weight.fill_(100), conv.scale.fill_(0.01)
    >>> conv(torch.tensor([[[[1.27, -1.0]]]])).round(decimals=4)
    tensor([[[[1.2700, 0.0000]]]])
    """

    __slots__ = ()
    own_parameters: ClassVar = frozenset({"bias", "original_weight"})
    own_buffers: ClassVar = frozenset({"weight", "scale", "rounding"})

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: tuple[int, int],
        *,
        rounding: bool = False,
        device: torch.device | str | None = None,
        **settings: Any,
    ) -> None:
        # On the meta device, because integers replace the float weight at once.
        super().__init__(in_channels, out_channels, kernel_size, device="meta", **settings)
        del self.weight
        self.add_integers(rounding=rounding, device=device)
        if self.bias is not None:
            self.bias = torch.nn.Parameter(torch.zeros(out_channels, device=device))

    def check_attributes(self) -> None:
        """Raise a ValueError if a file has set values that no operator takes, or several groups."""
        super().check_attributes()
        if self.groups != 1:
            raise ValueError(f"groups is {self.groups}, expected 1")

    def forward(self, input: Tensor, other: Tensor | None = None) -> Tensor:
        """Return the result for an input and, optionally, a value to add."""
        plain = runs_plainly() and is_plain_tensor(input, _FLOAT) and (other is None or is_plain_tensor(other, _FLOAT))
        bias = self.bias
        if not plain or needs_gradient(input, other, bias) or not (bias is None or is_plain_tensor(bias.data, _FLOAT)):
            return self._plain(input, other)
        output = self._output(input.shape) if self.groups == 1 else None
        packed = None if output is None else self.packed()
        if packed is None or not (other is None or other.shape == output):
            return self._plain(input, other)
        activation, alpha, beta = self._activation
        result: Tensor = CONV(
            input, packed.panels, bias, self.out_channels, *self.window, 1, CODES[activation], alpha, beta, other,
            packed.scale, packed.sums, packed.rounding,
        )  # fmt: skip
        return self._in_format(result, input)

    def _plain_weight(self, input: Tensor) -> Tensor:
        weight = window_of(self.weight).float() * self.scale.view(-1, 1, 1, 1)
        # Inputs are not rounded here, so the weight gets back the factors that it was divided by.
        rounding = self._buffers.get("rounding")
        return (weight if rounding is None else weight * rounding[0].view(-1, 1, 1)).to(input.dtype)

    def extra_repr(self) -> str:
        """Return the settings in the form of ``nn.Conv2d``."""
        return super().extra_repr() + (", static" if "rounding" in self._buffers else "")


class QuantizedConv1d(QuantizedConv2d):
    """``activation(conv1d(pad(x), weight * scale, bias) + other)`` of integers; ``other`` is optional.

    ``x`` is (N, in_channels, L), ``weight`` (out_channels, in_channels, width) in int8; each of the N inputs is rounded
    in steps of its own. The settings are those of a `QuantizedConv2d` over one row: kernel, stride and dilation of the
    row are 1.

    >>> conv = QuantizedConv1d(1, 1, (1, 2), bias=False)
    >>> _ = conv.weight.fill_(100), conv.scale.fill_(0.01)
    >>> conv(torch.tensor([[[1.27, -1.0, 0.5]]])).round(decimals=4)
    tensor([[[ 0.2700, -0.5000]]])
    """

    __slots__ = ()
    dims = 1

    def forward(self, input: Tensor, other: Tensor | None = None) -> Tensor:
        """Return the result for an input and, optionally, a value to add."""
        return super().forward(input.unsqueeze(-2), None if other is None else other.unsqueeze(-2)).squeeze(-2)
