"""`PackedConv2d` and `PackedConv1d`: convolution, sum and activation in one oneDNN operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt_cpu._torch import is_channels_last, mkldnn_enabled
from fxopt_cpu.layers.epilogue import NONE, Activation, Norm, check_epilogue
from fxopt_cpu.layers.packed_layer import PackedLayer
from fxopt_cpu.operators import onednn
from fxopt_cpu.operators.conv import Window, pack_convolution, result_sizes, unpack_convolution
from fxopt_rewrite import Watched, check_settings, is_plain_tensor, needs_gradient, runs_in_transform, runs_plainly

Pair = tuple[int, int]
Shape = tuple[int, ...]
Copy = tuple[Watched, Tensor | None, int, Tensor]  # a weight packed for oneDNN: of what, beside which bias, and itself
_FORMATS = ("preserve", "contiguous", "channels_last")


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

    >>> conv = PackedConv2d(1, 1, (1, 1), activation=("relu",))
    >>> with torch.no_grad():
    ...     _ = conv.weight.fill_(2.0), conv.bias.fill_(-3.0)
    ...     conv(torch.tensor([[[[1.0, 2.0]]]])), conv(torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 1), 5.0))
    (tensor([[[[0., 1.]]]]), tensor([[[[4.]]]]))
    """

    __slots__ = ("_copy",)
    dims: ClassVar[int] = 2
    _copy: Copy | None  # one object, as other threads read it

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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, kernel_size
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.memory_format = memory_format
        self.weight = nn.Parameter(torch.empty(self.weight_shape, device=device, dtype=dtype))
        own_bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", own_bias)
        self._activation = tuple(Activation(*activation))

    def check_attributes(self) -> None:
        """Raise a ValueError if a file has set values that no operator takes, or several rows for one dimension."""
        check_epilogue(self.activation, Norm())
        sizes = {"kernel_size": (1, 1), "stride": (1, 1), "dilation": (1, 1), "padding": ((0, 0), (0, 0))}
        check_settings(self, in_channels=1, out_channels=0, groups=1, **sizes)
        if self.memory_format not in _FORMATS:
            raise ValueError(f"memory_format is {self.memory_format!r:.40}, expected one of {', '.join(_FORMATS)}")
        rows = (self.kernel_size[0], self.stride[0], self.dilation[0], self.padding[0])
        if self.dims == 1 and rows != (1, 1, 1, (0, 0)):
            raise ValueError(f"kernel size, stride, dilation and padding of rows are {rows}, expected 1, 1, 1 and none")

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape that the weight has to have."""
        return self.out_channels, self.in_channels // self.groups, *self.kernel_size[2 - self.dims :]

    @property
    def window(self) -> Window:
        """Its window."""
        return Window(self.kernel_size, self.stride, (*self.padding[0], *self.padding[1]), self.dilation)

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
                self._copy = None
            return self._plain(input, other)
        output, (padded, padding) = self._output(input.shape), self._padded(input)
        packed = None if output is None else self._reordered(weight, bias, padded, padding)
        if packed is None:
            return self._plain(input, other)
        unary, operands = onednn.unary_of(*self._activation), (bias, padding, self.stride, self.dilation, self.groups)
        if other is None:
            result: Tensor = onednn.CONVOLUTION(padded, packed, *operands, *(unary or onednn.NONE))
            return self._in_format(result if unary else self.activation(result), input)
        name = self.activation.name
        # With a sum, torch's oneDNN operator takes no activation but ReLU, and does not broadcast the other value.
        if is_plain_tensor(other, input.dtype) and other.shape == output and name in ("none", "relu"):
            after = "relu" if name == "relu" else None
            return self._in_format(onednn.SUM(padded, other, packed, *operands, "add", None, after, (), None), input)
        result = onednn.CONVOLUTION(padded, packed, *operands, *onednn.NONE)
        return self.activation(self._in_format(result, input) + other)

    def _padded(self, input: Tensor) -> tuple[Tensor, Pair]:
        """Return an input and what is left to pad, since operators pad both sides equally."""
        (top, bottom), (left, right) = self.padding
        if top == bottom and left == right:
            return input, (top, left)
        return F.pad(input, (left, right, top, bottom)), (0, 0)

    def _output(self, shape: Shape) -> Shape | None:
        """Return the shape of the result; None for shapes that torch refuses, and for empty tensors."""
        return _shape_of_result(shape, self.in_channels, self.out_channels, self.window)

    def _in_format(self, result: Tensor, input: Tensor) -> Tensor:
        """Return a result of the operator in the memory format that it is to have."""
        is_last = self.memory_format == "channels_last"
        if self.memory_format == "preserve" and not input.is_contiguous():
            is_last = input.is_contiguous(memory_format=torch.channels_last)
            # Strides of one image may be of either format, and torch's rule is written in Python: it takes 8 us.
            is_last = is_last and (len(input) > 1 or is_channels_last(input))
        return result.contiguous(memory_format=torch.channels_last if is_last else torch.contiguous_format)

    def _plain(self, input: Tensor, other: Tensor | None) -> Tensor:
        """Return the result of torch's own functions."""
        padded, padding = self._padded(input)
        weight = self._plain_weight(input)
        result = F.conv2d(padded, weight, self.bias, self.stride, padding, self.dilation, self.groups)
        result = self.activation(result if other is None else result + other)
        if self.memory_format == "channels_last" and isinstance(result, Tensor) and result.dim() == 4:  # type: ignore[redundant-expr]  # a Proxy while fx traces
            return result if runs_in_transform() else result.contiguous(memory_format=torch.channels_last)
        return result.contiguous() if self.memory_format == "contiguous" else result

    def _plain_weight(self, input: Tensor) -> Tensor:
        return self.weight

    def _reordered(self, weight: Tensor, bias: Tensor | None, padded: Tensor, padding: Pair) -> Tensor | None:
        """Return the weight packed for oneDNN; None without the operators, or if its changes cannot be noticed."""
        place = 0 if bias is None else bias.data_ptr()  # the bias's numbers are read at each call
        kept: Copy | None = getattr(self, "_copy", None)
        if kept is not None and kept[1] is bias and kept[2] == place and kept[0].hold((weight,)):
            return kept[3]
        self._copy = None
        fits = weight.shape == self.weight_shape and weight.is_cpu and _bias_fits(bias, weight)
        if not fits or weight.is_inference() or onednn.why_unsupported(weight.dtype, weight.device) is not None:
            return None
        settings = padding, self.stride, self.dilation, self.groups
        packed = onednn.pack_convolution(weight, *settings, tuple(padded.shape))
        self._copy = Watched((weight,)), bias, place, packed
        return packed

    def _in_panels(self, weight: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        # oneDNN's copy beside the panels would be a second packed weight, and would keep the plain one (`drops`).
        self._copy = None
        panels = pack_convolution(window_of(weight), self.groups)
        return panels, partial(_unpacked, panels, self.weight_shape, self.groups)

    @property
    def drops(self) -> bool:
        """Whether the plain weight may be dropped: not where calls of this layer have packed it for oneDNN, too."""
        return getattr(self, "_copy", None) is None

    def forget_derived(self) -> None:
        """Drop everything derived from the weight; the next call derives it again."""
        super().forget_derived()
        self._copy = None

    def extra_repr(self) -> str:
        """Return the settings in the form of ``nn.Conv2d``."""
        padding = tuple(first if first == last else (first, last) for first, last in self.padding)
        shown = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        shown += f", padding={padding}" if any(map(any, self.padding)) else ""
        shown += f", dilation={self.dilation}" if self.dilation != (1, 1) else ""
        shown += f", groups={self.groups}" if self.groups != 1 else ""
        shown += ", bias=False" if self.bias is None else ""
        shown += "" if self.memory_format == "preserve" else f", memory_format={self.memory_format}"
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

    def forward(self, input: Tensor, other: Tensor | None = None) -> Tensor:
        """Return the result for an input and, optionally, a value to add."""
        padded, (_, padding) = self._padded(input)
        result = F.conv1d(padded, self.weight, self.bias, self.stride[1], padding, self.dilation[1], self.groups)
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


@lru_cache(4096)
def _shape_of_result(shape: Shape, inputs: int, outputs: int, window: Window) -> Shape | None:
    if len(shape) != 4 or shape[1] != inputs or 0 in (*shape, outputs):
        return None
    sizes = result_sizes(shape[2:], window)
    return None if min(sizes) < 1 else (shape[0], outputs, *sizes)
