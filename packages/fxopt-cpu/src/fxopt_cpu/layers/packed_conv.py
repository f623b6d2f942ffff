"""`PackedConv2d` and `PackedConv1d`: convolution, sum and activation in one oneDNN operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt_cpu._torch import mkldnn_enabled
from fxopt_cpu.layers.epilogue import NONE, Activation, Norm, check_epilogue
from fxopt_cpu.layers.packed_layer import PackedLayer
from fxopt_cpu.operators import onednn
from fxopt_cpu.operators.conv import pack_convolution, result_sizes, unpack_convolution
from fxopt_rewrite import (
    Watched,
    check_settings,
    is_plain_tensor,
    needs_gradient,
    runs_in_transform,
    runs_plainly,
)

Pair = tuple[int, int]
Copy = tuple[Watched, Tensor | None, int, Tensor]  # a weight packed for oneDNN: of what, beside which bias, and itself
_FORMATS = ("preserve", "contiguous", "channels_last")
_MOST_PLANS = 64


@dataclass(frozen=True)
class ConvolutionPlan:
    """How to run the operator on inputs of one shape.

    Attributes:
        output: shape of the result.
        padding: of rows and of columns, on both sides, as the operator takes it.
        pad: padding of the input before that, as `F.pad` takes it; None for none.
        crop: where the result begins in what the operator computes, as row and column; None to take all of it.
        one_row: whether the result is one vector of channels, so that packing gains nothing: the weight is read once.
    """

    output: tuple[int, ...]
    padding: Pair
    pad: tuple[int, ...] | None = None
    crop: Pair | None = None
    one_row: bool = False


class PackedConv2d(PackedLayer):
    """``activation(conv2d(pad(x), weight, bias) + other)``; ``other`` is optional.

    ``x`` is (N, in_channels, H, W), ``weight`` (out_channels, in_channels / groups, height, width), ``bias``
    (out_channels,). Weight and bias are plain parameters with their usual names, and all that is saved. The first call
    packs a copy of the weight for oneDNN, and so does the first one after a change of the weight. The copy takes as
    much memory as the weight; it is neither pickled nor copied with the module.

    The operator runs where it computes the same: on dense float32 or bfloat16 CPU tensors, where no gradient is needed
    and nothing intercepts the call (``torch.compile``, ``torch.export``, ``torch.func``, autocast, modes). Everything
    else goes to torch's own ``conv2d``.

    Args:
        in_channels: number of channels of the input.
        out_channels: number of channels of the result.
        kernel_size: height and width of the kernel.
        stride: of rows and columns.
        padding: zeros before and after the rows, and before and after the columns.
        dilation: of rows and columns.
        groups: number of groups of channels.
        bias: whether it has a bias.
        activation: name and numbers of the activation of the sum, as `Activation` has them.
        memory_format: of results, "channels_last" as the operator returns them, "contiguous", or "preserve": that of
            the input.
        adds: whether it is called with a value to add.
        overwrites: whether the result may overwrite ``other``, because nothing reads it later. It does if ``other``
            is channels last.

    >>> conv = PackedConv2d(1, 1, (1, 1), activation=("relu",))
    >>> with torch.no_grad():
    ...     _ = conv.weight.fill_(2.0), conv.bias.fill_(-3.0)
    ...     conv(torch.tensor([[[[1.0, 2.0]]]])), conv(torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 1), 5.0))
    (tensor([[[[0., 1.]]]]), tensor([[[[4.]]]]))
    """

    __slots__ = ("_copy", "_plans")
    dims: ClassVar[int] = 2
    _copy: Copy | None  # one object, as other threads read it
    _plans: dict[tuple[int, ...], ConvolutionPlan | None]  # by input shape; None for shapes that torch has to compute

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
        activation: tuple[Any, ...] = (),
        memory_format: str = "preserve",
        adds: bool = False,
        overwrites: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, kernel_size
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.memory_format, self.adds, self.overwrites = memory_format, adds, overwrites
        self.weight = nn.Parameter(torch.empty(self.weight_shape, device=device, dtype=dtype))
        own_bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", own_bias)
        self._activation = tuple(Activation(*activation))
        self._prepare()

    def _prepare(self) -> None:
        """Set what follows from the settings."""
        stride, padding, groups = self.stride, self.padding, self.groups
        self._operands = (stride, self.dilation, groups)
        # A 1x1 convolution is a linear layer. Its operator has less overhead, but uses threads worse for few results.
        self._pointwise = (self.kernel_size, stride, groups, padding) == ((1, 1), (1, 1), 1, ((0, 0), (0, 0)))
        self._by_rows = self._pointwise and not self.adds and self.out_channels >= self.in_channels
        unary = onednn.unary_of(*self._activation)
        self._activates = unary is not None and (not self._by_rows or onednn.fuses_in_rows(self.activation.name))
        self._unary = unary if unary is not None and self._activates else onednn.NONE

    def check_attributes(self) -> None:
        """Raise a ValueError if a file has set values that no operator takes; derive what follows."""
        check_epilogue(self.activation, Norm())
        sizes = {"kernel_size": (1, 1), "stride": (1, 1), "dilation": (1, 1), "padding": ((0, 0), (0, 0))}
        check_settings(self, in_channels=1, out_channels=0, groups=1, **sizes)
        check_settings(self, adds=bool, overwrites=bool)
        if self.memory_format not in _FORMATS:
            raise ValueError(f"memory_format is {self.memory_format!r:.40}, expected one of {', '.join(_FORMATS)}")
        self._prepare()

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape that the weight has to have."""
        return self.out_channels, self.in_channels // self.groups, *self.kernel_size[2 - self.dims :]

    @property
    def overwritten(self) -> tuple[tuple[int, str], ...]:
        """The inputs that a call may write to, and return."""
        return ((1, "other"),) if self.overwrites else ()

    def forward(self, input: Tensor, other: Tensor | None = None) -> Tensor:
        """Return the result for an input and, optionally, a value to add."""
        if not (runs_plainly() and mkldnn_enabled()):
            return self._plain(input, other)
        parameters = self._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if weight is None or not is_plain_tensor(input, weight.dtype):
            return self._plain(input, other)
        if needs_gradient(input, weight, bias, other):
            if weight.requires_grad and not self.drops:  # some optimizers change it without a new version
                self._forget_copy()
            return self._plain(input, other)
        packed = self._reordered(weight, bias, input)
        plan = None if packed is None else self._kept_plan(input.shape)
        if packed is None or plan is None:
            return self._plain(input, other)
        if other is not None:
            return self._sum(input, other, packed, bias, plan)
        result = self._run_operator(input, packed, bias, plan, self._unary)
        result = result if self._activates else self.activation(result)
        return self._in_format(result, input)

    def _sum(self, input: Tensor, other: Tensor, packed: Tensor, bias: Tensor | None, plan: ConvolutionPlan) -> Tensor:
        """Return the activation of a sum; the operator needs equal shapes, and ReLU or no activation."""
        fits = (
            is_plain_tensor(other, input.dtype)
            and other.shape == plan.output
            and plan.pad is None
            and plan.crop is None
        )
        name = self.activation.name
        if not fits or self._by_rows or name not in ("none", "relu"):
            result = self._in_format(self._run_operator(input, packed, bias, plan, onednn.NONE), input)
            return self.activation(result + other)
        after = "relu" if name == "relu" else None
        operands = (packed, bias, plan.padding, *self._operands, "add", None, after, (), None)
        # The operator that makes a new sum takes up to 1.7 times as long.
        if self.overwrites and not torch.is_grad_enabled() and other.is_contiguous(memory_format=torch.channels_last):
            return self._in_format(onednn.SUM_INTO(other, input, *operands), input)
        return self._in_format(onednn.SUM(input, other, *operands), input)

    def _run_operator(
        self, input: Tensor, packed: Tensor, bias: Tensor | None, plan: ConvolutionPlan, unary: tuple[Any, ...]
    ) -> Tensor:
        """Return the result of the operator, which takes no padding that differs between sides."""
        result: Tensor
        if plan.one_row:
            result = F.linear(input.view(1, -1), self.weight.view(self.out_channels, -1), bias)
            result = result if unary is onednn.NONE else self.activation(result)
            return result.view(plan.output)
        if self._by_rows:
            result = onednn.LINEAR(input.permute(0, 2, 3, 1), packed, bias, *unary).permute(0, 3, 1, 2)
            return result
        padded = input if plan.pad is None else F.pad(input, plan.pad)
        result = onednn.CONVOLUTION(padded, packed, bias, plan.padding, *self._operands, *unary)
        if plan.crop is None:
            return result
        (row, column), (height, width) = plan.crop, plan.output[2:]
        return result[:, :, row : row + height, column : column + width]

    def _in_format(self, result: Tensor, input: Tensor) -> Tensor:
        """Return a result of the operator in the memory format that it is to have."""
        is_last = self.memory_format == "channels_last"
        if self.memory_format == "preserve":
            is_last = input.is_contiguous(memory_format=torch.channels_last) and not input.is_contiguous()
        return result.contiguous(memory_format=torch.channels_last if is_last else torch.contiguous_format)

    def _plain(self, input: Tensor, other: Tensor | None) -> Tensor:
        """Return the result of torch's own functions."""
        rows, columns = self.padding
        even = rows[0] == rows[1] and columns[0] == columns[1]
        padded = input if even else F.pad(input, (*columns, *rows))
        padding = (rows[0], columns[0]) if even else (0, 0)
        result = F.conv2d(
            padded, self._plain_weight(input), self.bias, self.stride, padding, self.dilation, self.groups
        )
        result = self.activation(result if other is None else result + other)
        if self.memory_format == "channels_last" and isinstance(result, Tensor) and result.dim() == 4:  # type: ignore[redundant-expr]  # a Proxy while fx traces
            return result if runs_in_transform() else result.contiguous(memory_format=torch.channels_last)
        return result.contiguous() if self.memory_format == "contiguous" else result

    def _plain_weight(self, input: Tensor) -> Tensor:
        return self.weight

    def _reordered(self, weight: Tensor, bias: Tensor | None, input: Tensor) -> Tensor | None:
        """Return the weight packed for oneDNN; None without the operators, or if its changes cannot be noticed."""
        place = 0 if bias is None else bias.data_ptr()  # the bias's numbers are read at each call
        kept: Copy | None = getattr(self, "_copy", None)
        if kept is not None and kept[1] is bias and kept[2] == place and kept[0].hold((weight,)):
            return kept[3]
        self._forget_copy()
        unfit = weight.shape != self.weight_shape or not _bias_fits(bias, weight)
        if unfit or weight.is_inference() or onednn.why_unsupported(weight.dtype, weight.device) is not None:
            return None
        plan = self._plan(input.shape)
        if not weight.is_cpu or plan is None:
            return None
        if self._by_rows:
            matrix = weight.view(self.out_channels, self.in_channels)
            packed = onednn.pack_linear(matrix, math.prod(plan.output) // self.out_channels)
        else:
            packed = onednn.pack_convolution(weight, plan.padding, *self._operands, tuple(input.shape))
        self._copy = Watched((weight,)), bias, place, packed
        return packed

    def _in_panels(self, weight: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        self._forget_copy()
        panels = pack_convolution(window_of(weight), self.groups)
        return panels, partial(_unpacked, panels, self.weight_shape, self.groups)

    @property
    def drops(self) -> bool:
        """Whether the plain weight may be dropped: not where calls of this layer have packed it for oneDNN, too."""
        return getattr(self, "_copy", None) is None

    def _forget_copy(self) -> None:
        self._copy, self._plans = None, {}

    def forget_derived(self) -> None:
        """Drop everything derived from the weight; the next call derives it again."""
        super().forget_derived()
        self._forget_copy()

    def _kept_plan(self, shape: torch.Size) -> ConvolutionPlan | None:
        plans = self._plans
        try:
            return plans[shape]
        except KeyError:
            if len(plans) >= _MOST_PLANS:
                plans.clear()
            plan = plans[shape] = self._plan(shape)
            return plan

    def _plan(self, shape: torch.Size) -> ConvolutionPlan | None:
        """Return how to compute inputs of a shape; None for shapes that torch refuses, and for empty tensors."""
        if len(shape) != 4 or shape[1] != self.in_channels or 0 in shape or self.out_channels == 0:
            return None
        (top, bottom), (left, right) = self.padding
        sizes = result_sizes(shape[2:], self.kernel_size, self.stride, (top, bottom, left, right), self.dilation)
        if min(sizes) < 1:
            return None
        output = (shape[0], self.out_channels, *sizes)
        if top == bottom and left == right:
            one_row = self._pointwise and math.prod(output) == self.out_channels
            return ConvolutionPlan(output, (top, left), one_row=one_row)
        if math.prod(shape) < math.prod(output):  # copying the input is cheaper than copying the result
            return ConvolutionPlan(output, (0, 0), pad=(left, right, top, bottom))
        first = [_first_result(*sides, stride) for sides, stride in zip(self.padding, self.stride, strict=True)]
        rows, columns = (pad[0] + f * s for pad, f, s in zip(self.padding, first, self.stride, strict=True))
        return ConvolutionPlan(output, (rows, columns), crop=(first[0], first[1]))

    def extra_repr(self) -> str:
        """Return the settings in the form of ``nn.Conv2d``."""
        padding = tuple(first if first == last else (first, last) for first, last in self.padding)
        shown = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        shown += f", padding={padding}" if any(map(any, self.padding)) else ""
        shown += f", dilation={self.dilation}" if self.dilation != (1, 1) else ""
        shown += f", groups={self.groups}" if self.groups != 1 else ""
        shown += ", bias=False" if self.bias is None else ""
        shown += "" if self.memory_format == "preserve" else f", memory_format={self.memory_format}"
        shown += ", overwrites=True" if self.overwrites else ""
        return shown if self.activation == NONE else f"{shown}, activation={self.activation}"


class PackedConv1d(PackedConv2d):
    """``activation(conv1d(pad(x), weight, bias) + other)``; ``other`` is optional.

    ``x`` is (N, in_channels, L), ``weight`` (out_channels, in_channels / groups, width). The settings are those of a
    `PackedConv2d` over one row: kernel, stride and dilation of the row are 1. Plans compute it that way; outside of a
    plan it is torch's ``conv1d``, because oneDNN's order of elements would have to be undone after each layer.

    >>> conv = PackedConv1d(1, 1, (1, 2), bias=False)
    >>> with torch.no_grad():
    ...     _ = conv.weight.fill_(2.0)
    ...     conv(torch.tensor([[[1.0, 2.0, 3.0]]]))
    tensor([[[ 6., 10.]]])
    """

    __slots__ = ()
    dims = 1

    def check_attributes(self) -> None:
        """Raise a ValueError if a file has set values that no operator takes, or more than one row."""
        super().check_attributes()
        rows = (self.kernel_size[0], self.stride[0], self.dilation[0], self.padding[0])
        if rows != (1, 1, 1, (0, 0)):
            raise ValueError(f"kernel size, stride, dilation and padding of rows are {rows}, expected 1, 1, 1 and none")

    def forward(self, input: Tensor, other: Tensor | None = None) -> Tensor:
        """Return the result for an input and, optionally, a value to add."""
        _, (before, after) = self.padding
        padded = input if before == after else F.pad(input, (before, after))
        padding = before if before == after else 0
        stride, dilation = self.stride[1], self.dilation[1]
        result = F.conv1d(padded, self.weight, self.bias, stride, padding, dilation, self.groups)
        return self.activation(result if other is None else result + other)


def sides_of(setting: Sequence[int], row: int = 1) -> Pair:
    """Return a setting for rows and columns; for one dimension, `row` is the setting for rows.

    >>> sides_of((3, 5)), sides_of((5,))
    ((3, 5), (1, 5))
    """
    return (row, setting[0]) if len(setting) == 1 else (setting[0], setting[1])


def window_of(weight: Tensor) -> Tensor:
    """Return a weight over rows and columns; a one-dimensional kernel becomes one row.

    >>> window_of(torch.ones(4, 3, 5)).shape
    torch.Size([4, 3, 1, 5])
    """
    return weight if weight.dim() == 4 else weight.unsqueeze(-2)


def _unpacked(panels: Tensor, shape: Sequence[int], groups: int) -> Tensor:
    """Return the plain weight."""
    windows = unpack_convolution(panels, (*shape[:2], *(1,) * (4 - len(shape)), *shape[2:]), groups)
    return windows.reshape(shape).clone(memory_format=torch.contiguous_format)


def _bias_fits(bias: Tensor | None, weight: Tensor) -> bool:
    """Return whether a bias is safe for the operators, which do not check its size."""
    if bias is None:
        return True
    return bias.shape == weight.shape[:1] and bias.dtype == weight.dtype and bias.is_cpu and bias.is_contiguous()


def _first_result(before: int, after: int, stride: int) -> int:
    """Return where the wanted result begins in that of a convolution with equal padding on both sides.

    The operator pads both sides equally. With enough zeros it computes the wanted result and more.
    """
    return 0 if before >= after else -(-(after - before) // stride)
