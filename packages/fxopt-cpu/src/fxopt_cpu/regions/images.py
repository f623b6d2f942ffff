"""Convolutions, pools and activations of images in regions, as steps of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from fxopt_cpu.layers.epilogue import Activation, activation_named
from fxopt_cpu.layers.packed_conv import PackedConv2d, Pair, sides_of, window_of
from fxopt_cpu.library import isa
from fxopt_cpu.operators.conv import Window, pack_convolution
from fxopt_cpu.operators.plan import PlanBuilder, Value, need
from fxopt_cpu.passes.matching import is_float
from fxopt_rewrite import (
    ActivationCall,
    BatchNormCall,
    ConvolutionCall,
    GraphIndex,
    TensorRef,
    is_plain_module,
    read_activation,
    read_batch_norm,
    read_convolution,
    read_operation,
    tensor_facts,
)

#: What plans have computed from layers' tensors, by the tensors' ids and the layers' settings (`compute`).
Kept = dict[tuple[object, ...], tuple[Tensor, ...]]
_NEAREST = ("nearest", "nearest-exact")


def is_weight(tensor: Any) -> bool:
    """Return whether plans can read a tensor of the model: a plain one of float32 on a CPU."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.dtype is torch.float32 and tensor.is_cpu


def convolutions_fit(index: GraphIndex) -> bool:
    """Return whether a graph has convolutions, and the operator computes all of them: plans take all or none.

    It takes kernels of at most 256 places.
    """
    found = [module for module in index.modules.values() if isinstance(module, PackedConv2d)]
    fit = all(math.prod(each.kernel_size) <= 256 and each.packable for each in found)
    # Processors without AVX2 run these layers one by one, by oneDNN.
    return bool(found) and isa() not in (None, "portable") and fit


def convolve(builder: PlanBuilder, layer: PackedConv2d, *args: Value) -> Value:
    """Add a convolution to a plan; the arguments are its input and, optionally, the value to add."""
    input, *residuals = map(_as_images, args)
    packed = layer.packed()
    if packed is None:
        raise ValueError("the weight was made in inference mode, so that its changes cannot be noticed")
    bias = dict.get(layer._parameters, "bias")  # which does not thaw
    made = builder.conv(
        input, packed.panels, (bias, packed.scale, packed.sums, packed.rounding), window=layer.window,
        features=layer.out_channels, groups=layer.groups, activation=layer.activation,
        residual=residuals[0] if residuals else None,
    )  # fmt: skip
    return _like(args[0], made)


def _as_images(value: Value) -> Value:
    """Return (count, channels, length) as images of one row."""
    return value if len(value.shape) == 4 else Value(value.buffer, value.layout.unsqueeze(-2))


def _like(input: Value, made: Value) -> Value:
    """Return a result for `_as_images` with the number of dimensions of the input."""
    return made if len(input.shape) == 4 else Value(made.buffer, made.layout.squeeze(-2))


class Pooling(NamedTuple):
    """A pooling operation.

    Attributes:
        input: the images.
        largest: whether it takes the largest value of a window, and not the mean.
        kernel: its size; None for the whole image.
        stride: of its windows.
        padding: of rows and of columns.
        dilation: of its windows.
        counts_padding: whether means count zeros around the images.
        keeps_sizes: whether the result has rows and columns.
        ceil: whether windows at the end may be cut off.
    """

    input: Node
    largest: bool
    kernel: Pair | None = None
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    counts_padding: bool = True
    keeps_sizes: bool = True
    ceil: bool = False


def pooling_of(index: GraphIndex, node: Node) -> Pooling | None:
    """Return the pool that a node computes; None for anything else, and for sizes that the graph computes."""
    call = read_operation(index, node)
    source = None if call is None else call.input
    rank = None if source is None or not is_float(source) else _rank(source)
    if call is None or source is None or rank not in (3, 4):
        return None
    arguments = call.arguments
    if call.name == "mean":
        dims = arguments.get("dim")
        dims = dims if isinstance(dims, tuple) else (dims,)
        places = sorted(dim % rank for dim in dims if type(dim) is int)
        whole = places == [*range(2, rank)] and not arguments["dtype"]
        return Pooling(source, False, keeps_sizes=arguments["keepdim"] is True) if whole else None
    if call.name == f"adaptive_avg_pool{rank - 2}d":
        return Pooling(source, False) if _pair(arguments["output_size"]) == (1, 1) else None
    two = rank == 4 and call.name in ("max_pool2d", "avg_pool2d")  # of three dimensions, images without a batch
    return _windows(source, call.name == "max_pool2d", arguments) if two else None


def _windows(source: Node, largest: bool, settings: Mapping[str, Any]) -> Pooling | None:
    kernel = _pair(settings["kernel_size"])
    # Exported graphs write an empty list for the default, the size of the kernel.
    stride = _pair(settings.get("stride") or kernel)
    padding, dilation = _pair(settings.get("padding") or 0), _pair(settings.get("dilation") or 1)
    if settings.get("return_indices") or settings.get("divisor_override"):
        return None
    if kernel is None or stride is None or padding is None or dilation is None:
        return None
    counts = settings.get("count_include_pad") is not False
    return Pooling(source, largest, kernel, stride, padding, dilation, counts, ceil=settings.get("ceil_mode") is True)


def _pair(value: object) -> Pair | None:
    values: Any = value if isinstance(value, list | tuple) else (value, value)
    whole = len(values) in (1, 2) and all(type(each) is int for each in values)
    return (values[0], values[-1]) if whole else None


def _rank(node: Node) -> int | None:
    facts = tensor_facts(node)
    return None if facts is None else facts.rank


def pool(builder: PlanBuilder, found: Pooling, input: Value) -> Value:
    """Add a pool to a plan."""
    given, input = input, _as_images(input)
    kernel, padding = found.kernel or (input.shape[2], input.shape[3]), list[int]()
    settings = kernel, found.stride, found.padding, found.dilation
    # torch's own function gives the sizes with `ceil_mode`, which are the same for means.
    results = F.max_pool2d(input.layout, *settings, found.ceil).shape[2:]
    for size, result, width, stride, pad, dilation in zip(input.shape[2:], results, *settings, strict=True):
        padding += [pad, max(pad, (result - 1) * stride + dilation * (width - 1) + 1 - size - pad)]
    cut = padding[::2] != padding[1::2]  # windows at the end, of which what is cut off does not count
    # For means over such windows, torch counts padding but nothing beyond it; the step counts both or neither.
    need(not cut or found.largest or not found.counts_padding or not any(found.padding))
    window = Window(kernel, found.stride, padding, found.dilation)
    made = builder.pool(input, window=window, largest=found.largest, counts_padding=found.counts_padding and not cut)
    return _like(given, made) if found.keeps_sizes else made.permute(0, 2, 3, 1).view(made.shape[0], made.shape[1])


def activation_of(index: GraphIndex, node: Node) -> Activation | None:
    """Return the activation that a node computes, in place only on a value that nothing else reads; else None."""
    call = read_activation(index, node)
    if not isinstance(call, ActivationCall) or not is_float(call.input):
        return None
    return None if call.inplace and not _is_own(index, call.input) else activation_named(call.name, call.settings)


class GroupNorm(NamedTuple):
    """A norm over groups of channels.

    Attributes:
        input: the images.
        groups: how many groups there are; None for an instance norm, where each channel is one.
        eps: what is added to the variance.
        tensors: weight and bias, if there are any.
    """

    input: Node
    groups: int | None
    eps: float
    tensors: dict[str, TensorRef]


def group_norm_of(index: GraphIndex, node: Node) -> GroupNorm | None:
    """Return the norm over groups of channels that a node computes; None for anything else."""
    call, module = read_operation(index, node), index.module_of(node)
    names = ("group_norm", "instance_norm")
    if call is None or call.name not in names or call.input is None or not is_float(call.input):
        return None
    given = {key: value for key, value in call.arguments.items() if value is not None}
    if {"running_mean", "running_var"} & {*given} or given.get("use_input_stats") is False:
        return None
    groups: Any = given.get("num_groups")
    eps: Any = given.get("eps")
    tensors: dict[str, Any] = {key: given[key] for key in ("weight", "bias") if key in given}
    known = all(isinstance(each, TensorRef) and is_weight(each.tensor) for each in tensors.values())
    plain = known and type(groups) in (int, NoneType) and type(eps) is float
    plain = plain and (module is None or is_plain_module(module)) and _rank(call.input) in (3, 4)
    return GroupNorm(call.input, groups, eps, tensors) if plain else None


def normalize(
    builder: PlanBuilder, input: Value, call: GroupNorm, tensors: Mapping[str, Value], activation: Activation
) -> Value:
    """Add a norm over groups of channels, and the activation of its result, to a plan."""
    images = _as_images(input)
    count, channels, values = *images.shape[:2], math.prod(images.shape)
    groups = channels if call.groups is None else call.groups
    need(groups > 0 and channels % groups == 0 and all(each.shape == (channels,) for each in tensors.values()))
    need(values not in (0, count * groups))  # torch's functions may raise where each group has one value
    return _like(input, builder.group_norm(images, groups, **tensors, eps=call.eps, activation=activation))


def plain_layer_of(index: GraphIndex, node: Node) -> BatchNormCall | ConvolutionCall | None:
    """Return the batch norm or convolution of images that a node computes with torch; None if a plan cannot.

    Batch norms are those that no convolution took in; convolutions those that share modules or tensors, or enlarge
    images. A plan holds a copy of their tensors, in another form.
    """
    norm, convolution, module = read_batch_norm(index, node), read_convolution(index, node), index.module_of(node)
    call: BatchNormCall | ConvolutionCall
    if isinstance(norm, BatchNormCall) and not norm.uses_batch_statistics:
        call = norm
    elif isinstance(convolution, ConvolutionCall) and _is_computed(convolution):
        call = convolution
    else:
        return None
    rank = _rank(call.input)
    if not is_float(call.input) or rank not in _ranks(call) or not (module is None or is_plain_module(module)):
        return None
    # `num_batches_tracked` is an integer, and results do not depend on it.
    tensors = (ref.tensor for ref in call.tensors if ref is not getattr(call, "counter", None))
    return call if all(map(is_weight, tensors)) else None


def _ranks(call: BatchNormCall | ConvolutionCall) -> tuple[int, ...]:
    """Return the numbers of dimensions that an input may have."""
    return (3, 4) if isinstance(call, BatchNormCall) else (call.dims + 2,)


def _is_computed(call: ConvolutionCall) -> bool:
    """Return whether the operator computes a convolution; transposed ones of images if windows lie side by side."""
    kernel = tuple(call.weight.tensor.shape[2:])
    if call.dims > 2 or call.padding_mode != "zeros" or math.prod(kernel) > 256 or not isinstance(call.padding, tuple):
        return False
    if not call.transposed:
        return True
    if call.dims == 1:
        # Only windows of whole strides: zeros in place of what they lack would turn infinity into NaN. Output padding
        # is taken from the elements that padding cut off.
        plain = (call.dilation, call.groups) == ((1,), 1) and kernel[0] % call.stride[0] == 0
        return plain and call.output_padding[0] <= call.padding[0]
    settings = (call.stride, call.padding, call.output_padding, call.dilation, call.groups)
    return settings == (kernel, (0, 0), (0, 0), (1, 1), 1)


def compute(builder: PlanBuilder, call: BatchNormCall | ConvolutionCall, input: Value, kept: Kept) -> Value:
    """Add a layer of torch to a plan.

    Args:
        builder: builds the plan.
        call: the layer.
        input: its input.
        kept: what other plans for the same layers have computed.
    """
    settings = (call.eps,) if isinstance(call, BatchNormCall) else (call.groups, call.transposed, call.stride)
    # Ids are safe: `kept` belongs to an `Unchanged`, which does not outlive a change of these tensors.
    key = (call.bias is None, *(id(ref.tensor) for ref in call.tensors), *settings)
    if key not in kept:
        with torch.no_grad():
            kept[key] = _scale_and_shift(call) if isinstance(call, BatchNormCall) else _panels(call)
    panels, *more = kept[key]
    channels = more[0].shape[0] if isinstance(call, BatchNormCall) else call.in_channels
    need(len(input.shape) in _ranks(call) and input.shape[1] == channels)
    images = _as_images(input)
    if isinstance(call, BatchNormCall):
        made = builder.conv(images, panels, more, window=Window((1, 1)), features=channels, groups=channels)
    elif call.transposed:
        return _enlarged(builder, call, images, panels, more)
    else:
        assert isinstance(call.padding, tuple)
        sides = [side for side in sides_of(call.padding, 0) for _ in range(2)]
        window = Window(window_of(call.weight.tensor).shape[2:], sides_of(call.stride), sides, sides_of(call.dilation))
        bias = () if call.bias is None else (call.bias.tensor,)
        made = builder.conv(images, panels, bias, window=window, features=call.out_channels, groups=call.groups)
    return _like(input, made)


def _scale_and_shift(call: BatchNormCall) -> tuple[Tensor, ...]:
    """Return a batch norm as a convolution of each channel with one number, and its bias."""
    mean, variance, weight, bias = (
        # In float64, so that the results are rounded once.
        None if ref is None else ref.tensor.double()
        for ref in (call.running_mean, call.running_var, call.weight, call.bias)
    )
    assert mean is not None
    assert variance is not None
    scale = torch.rsqrt(variance + call.eps) * (1 if weight is None else weight)
    shift = -mean * scale if bias is None else bias - mean * scale
    return pack_convolution(scale.float().view(-1, 1, 1, 1), len(scale)), shift.float()


def _panels(call: ConvolutionCall) -> tuple[Tensor, ...]:
    """Return the weight as the operator reads it; for a transposed convolution, with a bias for each of a window."""
    weight = call.weight.tensor.detach()
    if not call.transposed:
        return (pack_convolution(window_of(weight), call.groups),)
    taps = weight.shape[-1] // call.stride[-1]  # of one dimension: pixels that reach the same one
    # `result[p * stride + r]` sums `input[p - t] * weight[t * stride + r]` over t: the window reads t backwards.
    windows = weight.reshape(*weight.shape[:-1], taps, call.stride[-1]).flip(-2).movedim(-2, -1)
    # (in, out, height, width, taps), or without a height -> (height * width * out, in, 1, taps)
    panels = pack_convolution(windows.movedim((0, 1), (-2, -3)).flatten(0, -3).unsqueeze(-2), 1)
    return (panels,) if call.bias is None else (panels, call.bias.tensor.repeat(math.prod(call.stride)))


def _enlarged(
    builder: PlanBuilder, call: ConvolutionCall, input: Value, panels: Tensor, bias: Sequence[Tensor]
) -> Value:
    """Add a transposed convolution: each pixel becomes a window, and the windows are laid side by side.

    Along one dimension they lie so in memory; windows that overlap are summed by a convolution over them.
    """
    (count, _, height, width), channels = input.shape, call.out_channels
    if call.dims == 1:
        assert isinstance(call.padding, tuple)
        (stride,), (cut,), size = call.stride, call.padding, call.weight.tensor.shape[-1]
        taps = size // stride
        sides = (0, 0, taps - 1, taps - 1)
        made = builder.conv(input, panels, bias, window=Window((1, taps), padding=sides), features=stride * channels)
        values = made.permute(0, 2, 3, 1).view(count, made.shape[-1] * stride, channels)
        length = (width - 1) * stride - 2 * cut + size + call.output_padding[0]
        return values.narrow(1, cut, length).permute(0, 2, 1)
    high, wide = call.stride
    windows = builder.conv(input, panels, bias, window=Window((1, 1)), features=high * wide * channels)
    rows = windows.permute(0, 2, 3, 1).view(count * height, width, high, wide * channels)
    images = builder.elementwise(rows.transpose(1, 2)).view(count, height * high, width * wide, channels)
    return images.permute(0, 3, 1, 2)


def overwriting(index: GraphIndex, node: Node) -> str:
    """Return the name of an in-place operation on a value that nothing else reads; "" for anything else."""
    call = read_operation(index, node)
    return call.name if call is not None and call.inplace and call.input and _is_own(index, call.input) else ""


#: Operations in place on one value that a plan takes: each is asked about all before it, which would be quadratic.
_LONGEST_CHAIN = 32


def _is_own(index: GraphIndex, node: Node) -> bool:
    """Return whether only its one reader notices a write to a value: a plan makes a new value instead."""
    for _ in range(_LONGEST_CHAIN):
        if len(node.users) != 1 or node.op not in ("call_function", "call_method", "call_module"):
            return False
        call = read_operation(index, node)
        if call is None or not call.inplace or call.input is None:
            return not index.effects.effect(node).opaque and not index.effects.aliases(node)
        node = call.input
    return False


def enlarged_by(index: GraphIndex, node: Node) -> Node | None:
    """Return the images that a node resizes by nearest-neighbour interpolation; None for anything else."""
    module, call = index.module_of(node), read_operation(index, node)
    source: object = None
    if isinstance(module, nn.Upsample):
        if module.mode in _NEAREST and is_plain_module(module) and len(node.args) == 1 and not node.kwargs:
            source = node.args[0]
    elif call is not None and call.name in ("interpolate", "upsample_nearest2d", "_upsample_nearest_exact2d"):
        source = call.input if call.arguments.get("mode", "nearest") in _NEAREST else None
    return source if isinstance(source, Node) and is_float(source) and _rank(source) == 4 else None


def enlarge(builder: PlanBuilder, input: Value, compute: Callable[[Tensor], Tensor]) -> Value:
    """Add a step that picks pixels to a plan; the graph's own function tells which ones."""
    height, width = input.shape[2:]
    # Positions pass through the graph's function as float32, which is exact for integers up to 2**24.
    need(max(height, width) < 1 << 24)
    rows, columns = (torch.arange(size, dtype=torch.float32, device="cpu") for size in (height, width))
    down = compute(rows.view(1, 1, -1, 1).expand(1, 1, height, width))[0, 0, :, 0]
    along = compute(columns.view(1, 1, 1, -1).expand(1, 1, height, width))[0, 0, 0]
    return builder.pick(input, down.int().tolist(), along.int().tolist())


def concatenation_of(index: GraphIndex, node: Node) -> tuple[tuple[Node, ...], int] | None:
    """Return the float values that a node concatenates, and along which dimension; None for anything else."""
    call = read_operation(index, node)
    if call is None or call.name != "cat" or set(call.arguments) != {"tensors", "dim"}:  # with `out`, it writes
        return None
    parts, dim = call.arguments["tensors"], call.arguments["dim"]
    if type(parts) is not tuple or type(dim) is not int or not all(isinstance(each, Node) for each in parts):
        return None
    known = all(is_float(each) or enlarged_by(index, each) is not None for each in parts)
    return (parts, dim) if parts and known else None


def concatenate(builder: PlanBuilder, values: Sequence[Value], dim: int) -> Value:
    """Add a concatenation to a plan: of images with the channels last, in their order."""
    if not any(map(_is_last, values)):
        return builder.concatenate(values, dim)
    images = [_as_images(each).permute(0, 2, 3, 1) for each in values]
    # From the end, since the last dimension of (count, channels, length) becomes the columns.
    place = (0, 3, 1, 2)[dim if dim < 2 else dim - len(values[0].shape)]
    return _like(values[0], builder.concatenate(images, place).permute(0, 3, 1, 2))


def elementwise(builder: PlanBuilder, one: Value, other: Value | None, kind: str, activation: Activation) -> Value:
    """Add an element-wise operation to a plan: on images with the channels last, in their order."""
    operands = [one] if other is None else [one, other]
    rank = max(len(each.shape) for each in operands)
    if rank not in _ORDERS or not any(len(each.shape) == rank and _is_last(each) for each in operands):
        return builder.elementwise(one, other, kind, activation=activation)
    order, back = _ORDERS[rank]
    last = [each.view(*(1,) * (rank - len(each.shape)), *each.shape).permute(*order) for each in operands]
    made = builder.elementwise(last[0], None if other is None else last[1], kind, activation=activation)
    return made.permute(*back)


_ORDERS = {3: ((0, 2, 1), (0, 2, 1)), 4: ((0, 2, 3, 1), (0, 3, 1, 2))}  # of the channels last, and back


def _is_last(value: Value) -> bool:
    """Return whether the channels lie together, and elements of a row do not."""
    return len(value.shape) in _ORDERS and value.layout.stride(1) == 1 and not value.layout.is_contiguous()
