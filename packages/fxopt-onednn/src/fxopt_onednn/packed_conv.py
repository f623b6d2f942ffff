"""`PackedConv2d`: a convolution with what follows it, by oneDNN's operator and from a packed weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt_onednn.activations import NONE, Activation, Unary, applied
from fxopt_onednn.calling import is_plain, needs_gradient, runs_plainly
from fxopt_onednn.operators import CONVOLUTION, LINEAR, SUM, SUM_INTO, against_operators, pack_convolution, pack_linear
from fxopt_onednn.packing import PackedLayer, goes_with

Pair = tuple[int, int]


@dataclass(frozen=True)
class ConvolutionPlan:
    """How inputs of one shape are computed.

    Attributes:
        output: shape of the result.
        padding: of rows and of columns, on both sides, as the operator is given it.
        pad: what to pad the input with before that, as `F.pad` is given it; None for nothing.
        crop: first row and column of the result within what the operator computes; None where that is all of it.
        one_row: whether all there is are the channels of one element, so that the weight is only read once.
    """

    output: tuple[int, ...]
    padding: Pair
    pad: tuple[int, ...] | None = None
    crop: Pair | None = None
    one_row: bool = False


class PackedConv2d(PackedLayer):
    """``activation(conv2d(pad(x), weight, bias) + other)``; ``other`` is optional.

    ``x`` is (N, in_channels, H, W), ``weight`` (out_channels, in_channels / groups, height, width), ``bias``
    (out_channels,). Weight and bias are plain parameters under their usual names, which is what is saved. The first
    call packs a copy of the weight for oneDNN, and so does the first one after the weight has changed. The copy takes
    as much memory as the weight; it is neither pickled nor copied with the module.

    The operator runs where that computes the same: dense float32 or bfloat16 tensors on a CPU, nothing that asks for a
    gradient, and nobody who watches (``torch.compile``, ``torch.export``, ``torch.func``, autocast, modes). Everything
    else goes through torch's own ``conv2d``. A result has the memory format of its input.

    Args:
        in_channels: number of channels of the input.
        out_channels: number of channels of the result.
        kernel_size: height and width of the kernel.
        stride: of rows and columns.
        padding: zeros before and after the rows, and before and after the columns.
        dilation: of rows and columns.
        groups: number of groups of channels.
        bias: whether there is a bias.
        activation: what is applied to the sum.
        channels_last: whether results always lie channels last, which is how the operator gives them.
        adds: whether it is to be called with something to add.
        overwrites: whether the result may be written over ``other``, because nothing reads that any more. It is where
            that lies channels last.

    >>> conv = PackedConv2d(1, 1, (1, 1), activation=Activation("relu"))
    >>> with torch.no_grad():
    ...     _ = conv.weight.fill_(2.0), conv.bias.fill_(-3.0)
    ...     conv(torch.tensor([[[[1.0, 2.0]]]])), conv(torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 1), 5.0))
    (tensor([[[[0., 1.]]]]), tensor([[[[4.]]]]))
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        *,
        stride: Pair = (1, 1),
        padding: tuple[Pair, Pair] = ((0, 0), (0, 0)),
        dilation: Pair = (1, 1),
        groups: int = 1,
        bias: bool = True,
        activation: Activation = NONE,
        channels_last: bool = False,
        adds: bool = False,
        overwrites: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, kernel_size
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.channels_last, self.adds, self.overwrites = channels_last, adds, overwrites
        shape = (out_channels, in_channels // groups, *kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        own_bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", own_bias)
        self._operands = (stride, dilation, groups)
        # What looks at one element at a time is a linear layer. Its operator starts earlier, but shares the work of few
        # results among threads less well.
        self._pointwise = (kernel_size, stride, groups, padding) == ((1, 1), (1, 1), 1, ((0, 0), (0, 0)))
        self._by_rows = self._pointwise and not adds and out_channels >= in_channels
        self._unary = (activation.name, activation.scalars, activation.algorithm)

    def forward(self, input: Tensor, other: Tensor | None = None) -> Tensor:
        """Return the result for an input, and for what is to be added to it."""
        if not runs_plainly():
            return self._plain(input, other)
        parameters = self._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if weight is None or not is_plain(input, weight.dtype):
            return self._plain(input, other)
        packing = self.packing
        if needs_gradient(input, weight, bias, other):
            packing.forget_trained(weight)
            return self._plain(input, other)
        packed = packing.packed(weight, bias)
        if packed is None:
            packed = self._pack(weight, bias, input)
        try:
            plan = packing.plans[input.shape]
        except KeyError:
            plan = packing.plan(input.shape, self._plan(input.shape))
        if packed is None or plan is None:
            return self._plain(input, other)
        if other is not None:
            return self._sum(input, other, packed, bias, plan)
        if plan.pad is not None or plan.crop is not None:
            return self._laid_out(self._uneven(input, packed, bias, plan, self._unary), input)
        result = self._operated(input, packed, bias, plan, self._unary)
        return result if self.channels_last else self._laid_out(result, input)

    def _sum(self, input: Tensor, other: Tensor, packed: Tensor, bias: Tensor | None, plan: ConvolutionPlan) -> Tensor:
        """Return the result with something added; the operator takes what has the result's shape, and rectifies."""
        fits = is_plain(other, input.dtype) and other.shape == plan.output and plan.pad is None and plan.crop is None
        if not fits or self._by_rows or self._unary[0] not in ("none", "relu"):
            result = self._laid_out(self._uneven(input, packed, bias, plan, ("none", (), "")), input)
            return applied(self._unary, result + other)
        after = "relu" if self._unary[0] == "relu" else None
        operands = (packed, bias, plan.padding, *self._operands, "add", None, after, (), None)
        if self.overwrites and not torch.is_grad_enabled() and other.is_contiguous(memory_format=torch.channels_last):
            return self._laid_out(SUM_INTO(other, input, *operands), input)
        return self._laid_out(SUM(input, other, *operands), input)

    def _operated(
        self, input: Tensor, packed: Tensor, bias: Tensor | None, plan: ConvolutionPlan, unary: Unary
    ) -> Tensor:
        """Return what the operator computes."""
        result: Tensor
        if plan.one_row:
            row = F.linear(input.view(1, -1), self.weight.view(self.out_channels, -1), bias)
            result = applied(unary, row).view(plan.output)
        elif self._by_rows:
            result = LINEAR(input.permute(0, 2, 3, 1), packed, bias, *unary).permute(0, 3, 1, 2)
        else:
            result = CONVOLUTION(input, packed, bias, plan.padding, *self._operands, *unary)
        return result

    def _uneven(
        self, input: Tensor, packed: Tensor, bias: Tensor | None, plan: ConvolutionPlan, unary: Unary
    ) -> Tensor:
        """Return the result of a convolution whose sides are padded differently, which the operator has no form for."""
        padded = input if plan.pad is None else F.pad(input, plan.pad)
        result = self._operated(padded, packed, bias, plan, unary)
        if plan.crop is None:
            return result
        (row, column), (height, width) = plan.crop, plan.output[2:]
        return result[:, :, row : row + height, column : column + width]

    def _laid_out(self, result: Tensor, input: Tensor) -> Tensor:
        """Return what the operator has computed, channels last, or else in the memory format of the input."""
        last = torch.channels_last
        if self.channels_last or (input.is_contiguous(memory_format=last) and not input.is_contiguous()):
            return result.contiguous(memory_format=last)
        return result.contiguous()

    def _plain(self, input: Tensor, other: Tensor | None) -> Tensor:
        """Return the result by torch's own functions."""
        rows, columns = self.padding
        even = rows[0] == rows[1] and columns[0] == columns[1]
        padded = input if even else F.pad(input, (*columns, *rows))
        padding = (rows[0], columns[0]) if even else (0, 0)
        result = F.conv2d(padded, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)
        return applied(self._unary, result if other is None else result + other)

    def by_torch(self) -> Callable[..., Tensor]:
        """Return what computes the same by torch's own functions, with the present weights as constants."""
        bias = None if self.bias is None else self.bias.detach()
        weight, padding = self.weight.detach(), self.padding
        even = evenly_padded(weight, padding, self.dilation)
        sides = None if even is not None else (*padding[1], *padding[0])
        weight, zeros = (weight, (0, 0)) if even is None else even
        rest = (self.stride, zeros, self.dilation, self.groups)

        def computed(input: Tensor, other: Tensor | None = None) -> Tensor:
            result = F.conv2d(input if sides is None else F.pad(input, sides), weight, bias, *rest)
            return applied(self._unary, result if other is None else result + other)

        return computed

    def _pack(self, weight: Tensor, bias: Tensor | None, input: Tensor) -> Tensor | None:
        """Pack the weight, if this processor has the operators and the weight can be watched for changes."""
        self.packing.clear()
        expected = (self.out_channels, self.in_channels // self.groups, *self.kernel_size)
        unfit = weight.shape != expected or not goes_with(bias, weight)
        if unfit or weight.is_inference() or against_operators(weight.dtype, weight.device) is not None:
            return None
        plan = self._plan(input.shape)
        if not weight.is_cpu or plan is None:
            return None
        if self._by_rows:
            matrix = weight.view(self.out_channels, self.in_channels)
            return self.packing.keep(weight, bias, pack_linear(matrix, math.prod(plan.output) // self.out_channels))
        return self.packing.keep(
            weight, bias, pack_convolution(weight, plan.padding, *self._operands, tuple(input.shape))
        )

    def _plan(self, shape: torch.Size) -> ConvolutionPlan | None:
        """Return how to compute inputs of a shape; None for what torch refuses, or what has no values."""
        if len(shape) != 4 or shape[1] != self.in_channels or 0 in shape or self.out_channels == 0:
            return None
        settings = zip(shape[2:], self.padding, self.kernel_size, self.stride, self.dilation, strict=True)
        sizes = [(size + sum(pad) - d * (k - 1) - 1) // s + 1 for size, pad, k, s, d in settings]
        if min(sizes) < 1:
            return None
        output = (shape[0], self.out_channels, *sizes)
        (top, bottom), (left, right) = self.padding
        if top == bottom and left == right:
            return ConvolutionPlan(
                output, (top, left), one_row=self._pointwise and math.prod(output) == self.out_channels
            )
        if math.prod(shape) < math.prod(output):  # to copy the input takes less than to copy the result
            return ConvolutionPlan(output, (0, 0), pad=(left, right, top, bottom))
        first = [_first_place(*sides, stride) for sides, stride in zip(self.padding, self.stride, strict=True)]
        rows, columns = (pad[0] + f * s for pad, f, s in zip(self.padding, first, self.stride, strict=True))
        return ConvolutionPlan(output, (rows, columns), crop=(first[0], first[1]))

    def extra_repr(self) -> str:
        """Return the settings, as those of ``nn.Conv2d`` are shown."""
        padding = tuple(first if first == last else (first, last) for first, last in self.padding)
        shown = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        shown += f", padding={padding}" if any(map(any, self.padding)) else ""
        shown += f", dilation={self.dilation}" if self.dilation != (1, 1) else ""
        shown += f", groups={self.groups}" if self.groups != 1 else ""
        shown += ", bias=False" if self.bias is None else ""
        shown += ", channels_last=True" if self.channels_last else ""
        shown += ", overwrites=True" if self.overwrites else ""
        return shown if self.activation == NONE else f"{shown}, activation={self.activation}"


def evenly_padded(weight: Tensor, padding: tuple[Pair, Pair], dilation: Pair) -> tuple[Tensor, Pair] | None:
    """Return a kernel and a padding that is the same on both sides, which compute what these do; None where none do.

    With as many zeros before as after, a kernel reaches that many places too far back. Zeros at its beginning let it
    see nothing there.

    >>> weight, padding = evenly_padded(torch.ones(1, 1, 2, 2), ((0, 1), (0, 0)), (1, 1))
    >>> weight.flatten(0, 2).tolist(), padding
    ([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]], (1, 0))
    """
    added: list[int] = []
    for (before, after), step in zip(padding[::-1], dilation[::-1], strict=True):
        if (after - before) % step:
            return None
        added += [max(after - before, 0) // step, max(before - after, 0) // step]
    return F.pad(weight, added) if any(added) else weight, (max(padding[0]), max(padding[1]))


def _first_place(before: int, after: int, stride: int) -> int:
    """Return at which place of an evenly padded convolution that of an unevenly padded one begins.

    The operator pads both sides alike. With enough zeros on both, what it computes holds the wanted result, which
    begins a number of strides further on.
    """
    return 0 if before >= after else -(-(after - before) // stride)
