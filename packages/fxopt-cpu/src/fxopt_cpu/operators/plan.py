"""`fxopt::run`: many operators in one call, from a plan made for inputs of these shapes.

A plan is a tensor of integers (floats as their bits): a format, the arena's size, about how many nanoseconds it takes
(little work stays on one thread), how many inputs, outputs and weights there are, the shapes of inputs and outputs, and
steps. A step is its kind, its sizes and strides, and operands, each as the tensor it lies in (0 the arena, then inputs,
outputs and weights; -1 none) and the offset of its first element. `PlanBuilder` writes plans; `csrc/plan.cpp` checks
every operand against the tensors of the call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fxopt_cpu.layers.epilogue import CODES, NO_NORM, NONE, NORM_CODES, Activation, Norm
from fxopt_cpu.operators.attention import split
from fxopt_cpu.operators.conv import Window, is_depthwise, result_sizes
from fxopt_cpu.operators.definition import Operator
from fxopt_cpu.operators.linear import TOGETHER

#: As in csrc/plan.cpp, which refuses plans of another format.
FORMAT = 9
LINEAR, ATTENTION, NORM, EMBEDDING, ELEMENTWISE, CONVOLUTION, POOL, PICK, BLOCK, GROUP_NORM = range(1, 11)
#: The index is the number of the operation in csrc/kernels.h.
OPERATIONS = ("copy", "add", "subtract", "multiply", "divide")
FEW_CHANNELS, MOST_COPIED = 8, 4096  # as in csrc/kernels.h
MOST_TAPS = 4096  # of a window's side, as csrc/plan.cpp reads it
ALIGNMENT = 16  # elements of the arena: 64 bytes
# 384 KB, as `STRIPE_BYTES` in csrc/conv.cpp: the stripe that a block works on stays in the L2 cache.
MOST_OF_STRIPE = 96 << 10  # elements between the layers of a block that one row of results needs
LEAST_OF_BLOCK = 128 << 10  # elements of what a block expands; less stays in the L2 cache anyway


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of a plan: an input, a weight, what a step computed, or a view of one.

    Attributes:
        buffer: The index of the buffer that it lies in.
        layout: Shape, strides, offset and dtype, as a tensor on the device `meta`.
    """

    buffer: int
    layout: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return tuple(self.layout.shape)

    def view(self, *shape: int) -> Value:
        """Return the same elements in another shape, as `Tensor.view` does."""
        return Value(self.buffer, self.layout.view(*shape))

    def narrow(self, dim: int, start: int, length: int) -> Value:
        """Return a part of one dimension."""
        return Value(self.buffer, self.layout.narrow(dim, start, length))

    def transpose(self, first: int, second: int) -> Value:
        """Return the elements with two dimensions exchanged."""
        return Value(self.buffer, self.layout.transpose(first, second))

    def permute(self, *dims: int) -> Value:
        """Return the elements with the dimensions in this order."""
        return Value(self.buffer, self.layout.permute(*dims))

    def expand(self, *shape: int) -> Value:
        """Return the elements repeated along dimensions of size 1, as `Tensor.expand` does."""
        return Value(self.buffer, self.layout.expand(*shape))

    def split(self, heads: int, kv_heads: int) -> list[Value]:
        """Return query, key and value of their merged product, as `fxopt::attention_merged` reads them."""
        return [Value(self.buffer, each) for each in split(self.layout, heads, kv_heads)]


class Plan(NamedTuple):
    """What `torch.ops.fxopt.run` takes after the inputs.

    Attributes:
        weights: The tensors that `PlanBuilder.weight` was given, in their order. Others of the same shapes may take
            their places in a call.
        steps: The plan.
        arena: How many bytes the results between steps take.
    """

    weights: list[Tensor]
    steps: Tensor
    arena: int

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Compute the outputs."""
        outputs: list[Tensor] = torch.ops.fxopt.run(inputs, self.weights, self.steps)
        return outputs


class _Buffer:
    """Memory of values; `first` is the step that writes it, `last` the last one that reads it.

    Images that only steps with a pitch (the distance from pixel to pixel) write and read may lie within a wider buffer.
    """

    def __init__(self, kind: str, shape: Sequence[int], first: int) -> None:
        self.kind, self.shape, self.elements, self.first, self.last = kind, shape, math.prod(shape), first, first
        # `slot` is the place among the tensors of the plan, -1 for the arena. `within` is the wider buffer that this
        # one lies in from `channel` on, or itself. `movable` ends with the first step that takes no pitch.
        self.slot, self.own_offset = -1, 0
        self.movable, self.within, self.channel = True, self, 0

    @property
    def whole(self) -> _Buffer:
        """The buffer that it lies in."""
        return self if self.within is self else self.within.whole

    @property
    def offset(self) -> int:
        """Where it begins."""
        return self.own_offset if self.within is self else self.within.offset + self.channel


class _Layer(NamedTuple):
    """A step that is a convolution."""

    image: Value
    result: Value
    kernel: tuple[int, ...]
    settings: tuple[object, ...]  # stride and padding
    reach: int  # rows that one row of results reads
    depthwise: bool
    whole: bool  # of integers, or perhaps computed by Winograd's products, which blocks do not have
    residual: bool


def need(fits: bool) -> None:
    """Raise a ValueError where no step computes what is asked for: the nodes then run one by one."""
    if not fits:
        raise ValueError("a plan has no step for this call")


def _bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32).item())


def _codes(function: Activation | Norm) -> list[int]:
    """Return the number of an activation or norm, and the bits of its own numbers."""
    name, *numbers = function
    return [(CODES if isinstance(function, Activation) else NORM_CODES)[name], *map(_bits, numbers)]


class PlanBuilder:
    """Writes a plan: one method for each operator, which returns the value that the step computes.

    Example:
        >>> from fxopt_cpu.operators.linear import pack
        >>> weight = torch.randn(8, 4)
        >>> builder = PlanBuilder()
        >>> value = builder.input(torch.empty(2, 4))
        >>> product = builder.linear(value, pack(weight), features=8)
        >>> builder.output(builder.norm(product, norm=Norm("layer", 1e-5)))
        >>> plan = builder.build()
        >>> plan.steps.dtype, len(plan.weights), plan.arena
        (torch.int64, 1, 64)
    """

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []
        self._inputs: list[Value] = []
        self._outputs: list[Value] = []
        self._weights: list[tuple[Tensor, Value]] = []
        # Operands stand in a step as values, or None, and become two numbers each when the plan is built. Buffers stand
        # for the distance between their pixels, which is known once they have their places.
        self._steps: list[list[int | Value | _Buffer | None]] = []
        # Steps that copy a value into a channel of a concatenation: left out where the value may lie there itself.
        self._parts: list[tuple[int, _Buffer, _Buffer, int]] = []
        self._layers: dict[int, _Layer] = {}
        # Results of linear layers that no norm follows, by step; and the steps that read such a result of the last step
        # in bfloat16, with its buffer: it is rounded as it is written if nothing else reads it.
        self._products: dict[int, Value] = {}
        self._rounded: list[tuple[int, _Buffer]] = []
        self._nanoseconds = 0.0

    def input(self, like: Tensor) -> Value:
        """Return the next input, of this shape and dtype; it is made contiguous if it is not."""
        self._inputs.append(self._new("input", like.shape, like.dtype))
        return self._inputs[-1]

    def weight(self, tensor: Tensor) -> Value:
        """Return the value of a tensor that calls pass beside the inputs; the same tensor is one weight."""
        for known, value in self._weights:
            if known is tensor:
                return value
        self._weights.append((tensor, self._new("weight", tensor.shape, tensor.dtype)))
        return self._weights[-1][1]

    def _held(self, tensors: Sequence[Tensor | None], count: int) -> list[Value | None]:
        """Return so many tensors that calls pass beside the inputs; the last ones may be left out."""
        found = [None if each is None else self.weight(each) for each in tensors]
        return found + [None] * (count - len(found))

    def output(self, value: Value) -> None:
        """Make a value the next output, contiguous."""
        buffer = self._buffers[value.buffer]
        # A value that fills its own buffer is computed in the output directly; all others are copied there.
        if buffer.kind != "arena" or not value.layout.is_contiguous() or value.layout.numel() != buffer.elements:
            value = self.elementwise(value)
            buffer = self._buffers[value.buffer]
        buffer.kind = "output"
        self._outputs.append(value)

    def linear(
        self,
        input: Value,
        panels: Tensor,
        vectors: Sequence[Tensor | None] = (),
        *,
        features: int,
        activation: Activation = NONE,
        residual: Value | None = None,
        norm: Norm = NO_NORM,
        gated: bool = False,
    ) -> Value:
        """`fxopt::linear`; ``vectors`` are bias, scale, sums, rounding, and the norm's weight and bias."""
        bias, scale, sums, rounding, norm_weight, norm_bias = self._held(vectors, 6)
        depth, rows = input.shape[-1], math.prod(input.shape[:-1])
        input, input_stride = self._in_rows(input)
        residual, residual_stride = (None, 0) if residual is None else self._in_rows(residual)
        place, alone = len(self._steps), residual is None or residual.buffer != input.buffer
        if self._products.get(place - 1) is input and alone and panels.dtype is torch.bfloat16:
            self._rounded.append((place, self._buffers[input.buffer]))
        result = self._result((*input.shape[:-1], features))
        if norm.name == NO_NORM.name:
            self._products[place] = result
        numbers = [
            0, 0,  # whether input and result are rounded, see `build`
            list(TOGETHER).index(panels.dtype), rows, depth, features, *_codes(activation), *_codes(norm),
            int(gated), int(rounding is not None), input_stride, residual_stride,
        ]  # fmt: skip
        weights = [self.weight(panels), scale, sums, rounding, bias]
        self._step(LINEAR, numbers, [input, *weights, residual, norm_weight, norm_bias, result], rows * panels.numel())
        return result

    def attention(
        self, *operands: Value, mask: Value | None = None, scale: float, causal: bool = False, rounded: bool = False
    ) -> Value:
        """`fxopt::attention` of query, key and value."""
        query, key, value = operands
        batch, heads, queries, size = query.shape
        _, kv_heads, keys, value_size = value.shape
        need(key.shape == (batch, kv_heads, keys, size) and value.shape[0] == batch)
        need(kv_heads > 0 and heads % kv_heads == 0)
        numbers = [batch, heads, kv_heads, queries, keys, size, value_size, int(causal), int(rounded), _bits(scale)]
        for operand in operands:
            need(operand.layout.stride(3) == 1)
            numbers += operand.layout.stride()[:3]
        if mask is not None:
            mask = mask.expand(batch, heads, queries, keys)
        numbers += (0, 0, 0, 0) if mask is None else mask.layout.stride()
        result = self._result((batch, queries, heads * value_size))
        attended = mask is not None and mask.layout.dtype == torch.bool
        products = batch * heads * queries * keys * (size + value_size)
        self._step(ATTENTION, numbers, [*operands, int(attended), mask, result], products)
        return result

    def norm(
        self,
        input: Value,
        residual: Value | None = None,
        *,
        weight: Value | None = None,
        bias: Value | None = None,
        norm: Norm,
    ) -> Value:
        """`fxopt::norm`."""
        input, stride = self._in_rows(input)
        residual, residual_stride = (None, 0) if residual is None else self._in_rows(residual)
        result = self._result(input.shape)
        numbers = [math.prod(input.shape[:-1]), input.shape[-1], *_codes(norm), stride, residual_stride]
        self._step(NORM, numbers, [input, residual, weight, bias, result, None])  # None for the sum, which nobody reads
        return result

    def embedding_norm(
        self,
        ids: Sequence[Value],
        tables: Sequence[Value],
        *,
        weight: Value | None = None,
        bias: Value | None = None,
        norm: Norm = NO_NORM,
    ) -> Value:
        """`fxopt::embedding_norm`."""
        shape = _broadcast(*ids)
        size = tables[0].shape[1]
        result = self._result((*shape, size))
        operands: list[int | Value | None] = [result, weight, bias]
        sizes, strides = _four(shape, [part.layout.expand(shape).stride() for part in ids])
        for part, table, steps in zip(ids, tables, strides, strict=True):
            need(table.layout.stride(1) == 1 and table.shape[1] == size)
            operands += [table.shape[0], table.layout.stride(0), *steps, part, table]
        self._step(EMBEDDING, [*sizes, size, *_codes(norm), len(tables)], operands)
        return result

    def elementwise(
        self,
        a: Value,
        b: Value | None = None,
        operation: str = "copy",
        *,
        activation: Activation = NONE,
        into: Value | None = None,
    ) -> Value:
        """Return the activation of `a`, or of an operation (`OPERATIONS`) on it and `b`, contiguous.

        Args:
            a: the first operand.
            b: the second one.
            operation: the operation on both.
            activation: the activation.
            into: a part of a result, of this shape, to write to instead of a new result.
        """
        shape = _broadcast(a) if b is None else _broadcast(a, b)
        result = self._result(shape) if into is None else into
        views = [operand.layout.expand(shape).stride() for operand in (a, a if b is None else b, result)]
        sizes, strides = _four(shape, views)
        if strides[2][3] != 1 and sizes[0] == 1:  # rows of one element
            sizes, strides = [*sizes[1:], 1], [[*each[1:], 1] for each in strides]
        need(strides[2][3] == 1)
        numbers = [OPERATIONS.index(operation), *_codes(activation), *sizes]
        self._step(ELEMENTWISE, [*numbers, *strides[0], *strides[1], *strides[2][:3]], [a, b, result])
        return result

    def concatenate(self, values: Sequence[Value], dim: int) -> Value:
        """Return the concatenation of values along a dimension, contiguous."""
        lengths = [value.shape[dim] for value in values]
        shape = list(values[0].shape)
        shape[dim] = sum(lengths)
        result, start = self._result(shape), 0
        for value, length in zip(values, lengths, strict=True):
            into = result.narrow(dim, start, length)
            if len(shape) == 4 and dim == 3 and self._is_pitched(value):
                part, whole = self._buffers[value.buffer], self._buffers[result.buffer]
                # Part of a buffer, such as a chunk, cannot lie in two places and is copied.
                if value.layout.numel() == part.elements:
                    self._parts.append((len(self._steps), part, whole, start))
                sizes, steps = [1, 1, math.prod(shape[:3]), length], [0, 0, self._pitch(value), 1]
                numbers = [OPERATIONS.index("copy"), 0, 0, 0, *sizes, *steps, *steps, 0, 0, self._pitch(into)]
                self._step(ELEMENTWISE, numbers, [value, value, into], pitched=(value, into))
            else:
                self.elementwise(value, into=into)
            start += length
        return result

    def pick(self, input: Value, rows: Sequence[int], columns: Sequence[int]) -> Value:
        """Return images (images, channels, height, width) of these rows and columns of the input."""
        images = self._channels_last(input)
        result = self._result((images.shape[0], len(rows), len(columns), images.shape[3]))
        sizes = [*images.shape, len(rows), len(columns), self._pitch(images), self._pitch(result)]
        self._step(PICK, [*sizes, *rows, *columns], [images, result], pitched=(images, result))
        return result.permute(0, 3, 1, 2)

    def conv(
        self,
        input: Value,
        panels: Tensor,
        vectors: Sequence[Tensor | None] = (),
        *,
        window: Window,
        features: int,
        groups: int = 1,
        activation: Activation = NONE,
        residual: Value | None = None,
    ) -> Value:
        """`fxopt::conv`, channels last in memory; ``vectors`` are bias, scale, sums and rounding."""
        bias, scale, sums, rounding = self._held(vectors, 4)
        kernel, stride, padding, dilation = map(tuple, window)
        taps, channels, integers = math.prod(kernel), input.shape[1], panels.dtype is torch.int8
        # Few channels are copied anyway, so they may be planar, as in colour images.
        few = groups == 1 and channels < FEW_CHANNELS and taps > 1 and taps * channels <= MOST_COPIED
        planes = few and not integers and dilation == (1, 1) and input.layout.is_contiguous()
        images, numbers, sizes = self._window(input, window, planes=planes)
        result = self._result((input.shape[0], *sizes, features))
        other = None if residual is None else self._channels_last(residual, together=True)
        need(other is None or other.shape == result.shape)
        numbers += [channels if planes else self._pitch(images), self._pitch(result), features, groups, int(planes)]
        numbers += [*_codes(activation), int(integers), int(rounding is not None)]
        products = math.prod(result.shape) * taps * (channels // groups)
        pitched = (result,) if planes else (images, result)
        settings, reach = (*stride, *padding), (kernel[0] - 1) * dilation[0] + 1
        deep = is_depthwise(features, channels // groups, groups)
        whole = integers or (not few and (*kernel, *stride, *dilation, groups) == (3, 3, 1, 1, 1, 1, 1))
        self._layers[len(self._steps)] = _Layer(
            images, result, kernel, settings, reach, deep, whole, residual is not None
        )
        operands = [images, self.weight(panels), scale, sums, rounding, bias, other, result]
        # Products of integers count as a third: they take about a third of the time.
        self._step(CONVOLUTION, numbers, operands, products // (3 if integers else 1), pitched=pitched)
        return result.permute(0, 3, 1, 2)

    def pool(self, input: Value, *, window: Window, largest: bool, counts_padding: bool = True) -> Value:
        """Return the largest or the mean of each window of images (images, channels, height, width)."""
        images, numbers, sizes = self._window(input, window)
        result = self._result((input.shape[0], *sizes, input.shape[1]))
        numbers += [self._pitch(images), self._pitch(result), int(largest), int(counts_padding)]
        self._step(POOL, numbers, [images, result], pitched=(images, result))
        return result.permute(0, 3, 1, 2)

    def group_norm(
        self,
        input: Value,
        groups: int,
        *,
        weight: Value | None = None,
        bias: Value | None = None,
        eps: float,
        activation: Activation = NONE,
    ) -> Value:
        """Return the activation of the norm over groups of channels of images (images, channels, height, width)."""
        images = self._channels_last(input)
        count, height, width, channels = images.shape
        result = self._result(images.shape)
        numbers: list[int | _Buffer] = [count, height * width, channels, groups, _bits(eps), *_codes(activation)]
        numbers += [self._pitch(images), self._pitch(result)]
        self._step(GROUP_NORM, numbers, [images, weight, bias, result], pitched=(images, result))
        return result.permute(0, 3, 1, 2)

    def _window(
        self, input: Value, window: Window, *, planes: bool = False
    ) -> tuple[Value, list[int | _Buffer], list[int]]:
        """Return images with the channels last, the numbers of a window over them, and the sizes that result."""
        count, channels, *lengths = input.shape
        sizes = result_sizes(lengths, window)
        need(max(window.kernel) <= MOST_TAPS and min(sizes) >= 1)
        numbers: list[int | _Buffer] = [count, *lengths, channels, *(number for part in window for number in part)]
        return input if planes else self._channels_last(input), numbers, sizes

    def _channels_last(self, value: Value, *, together: bool = False) -> Value:
        """Return images as (images, height, width, channels): contiguous, or with a pitch if allowed."""
        last = value.permute(0, 2, 3, 1)
        fits = last.layout.is_contiguous() or (not together and self._is_pitched(last))
        return last if fits else self.elementwise(last)

    def _in_rows(self, value: Value) -> tuple[Value, int]:
        """Return a value whose rows have one stride, copied if they have not, and that stride."""
        _, (strides,) = _merged(value.shape[:-1], [value.layout.stride()[:-1]])
        if len(strides) > 1 or value.layout.stride(-1) != 1:
            value, strides = self.elementwise(value), []
        return value, strides[0] if strides else value.shape[-1]

    def build(self) -> Plan:
        """Return the plan, with places in the arena by the lifetimes of values."""
        # Blocks first: values between their layers get no memory, so they have no place in a concatenation.
        left_out = self._join() | self._unite()
        for place, buffer in self._rounded:
            if buffer.kind == "arena" and buffer.last == place:
                self._steps[place][1] = self._steps[place - 1][2] = 1
        arena = self._place()
        counts = [len(self._inputs), len(self._outputs), len(self._weights)]
        numbers = [FORMAT, arena, int(self._nanoseconds), *counts]
        # Slot 0 is the arena. Weights need no shapes: each step checks how many elements its operands have.
        for slot, value in enumerate((*self._inputs, *self._outputs, *(value for _, value in self._weights)), 1):
            buffer = self._buffers[value.buffer]
            need(buffer.slot < 0)
            buffer.slot = slot
            if slot <= counts[0] + counts[1]:
                numbers += [len(value.shape), *value.shape]
        for number, step in enumerate(self._steps):
            for part in step if number not in left_out else ():
                if part is None:
                    numbers += [-1, 0]
                elif isinstance(part, Value):
                    buffer = self._buffers[part.buffer]
                    numbers += [max(buffer.whole.slot, 0), buffer.offset + int(part.layout.storage_offset())]
                elif isinstance(part, _Buffer):
                    numbers.append(part.whole.shape[-1])
                else:
                    numbers.append(part)
        return Plan([tensor for tensor, _ in self._weights], torch.tensor(numbers, dtype=torch.int64), arena * 4)

    def _join(self) -> set[int]:
        """Join expanding, depthwise and projecting convolutions into blocks; return the steps that this leaves out.

        Expanded values of large images would be written to memory and read again; a block computes some rows of all
        its layers at a time.
        """
        left_out: set[int] = set()
        for step, deep in self._layers.items():
            expand, project = self._layers.get(step - 1), self._layers.get(step + 1)
            if expand is None or step - 1 in left_out or not deep.depthwise or expand.depthwise or expand.whole:
                continue
            rows = min(deep.reach, deep.image.shape[1])
            of_row = rows * math.prod(deep.image.shape[2:]) + math.prod(deep.result.shape[2:])
            large = math.prod(deep.image.shape[1:]) >= LEAST_OF_BLOCK and of_row <= MOST_OF_STRIPE
            # `_is_between` comes last: where it returns True, it has taken away the memory of the expanded images.
            if not large or expand.residual or not self._is_between(expand, deep, step):
                continue
            last, layers = step, [self._steps[step - 1][1:-1], self._steps[step][1:]]
            if project is not None and self._ends(project, deep, step + 1):
                last, layers = step + 1, [layers[0], layers[1][:-1], self._steps[step + 1][1:]]
            for place, numbers in enumerate(layers[1:], 1):
                operand = next(index for index, part in enumerate(numbers) if isinstance(part, Value))
                layers[place] = [*numbers[:operand], *numbers[operand + 1 :]]  # it reads the result of the layer before
            self._steps[step - 1] = [BLOCK, int(last > step), *(part for numbers in layers for part in numbers)]
            left_out |= {*range(step, last + 1)}
            # The block runs in place of its first step, so its result is written earlier than before.
            self._buffers[self._layers[last].result.buffer].first = step - 1
        return left_out

    def _ends(self, project: _Layer, deep: _Layer, step: int) -> bool:
        """Return whether a step is a 1 x 1 convolution and the only reader of a depthwise one."""
        single = project.kernel == (1, 1) and project.settings == (1, 1, 0, 0, 0, 0) and not project.depthwise
        return single and not project.whole and not deep.residual and self._is_between(deep, project, step)

    def _is_between(self, first: _Layer, second: _Layer, step: int) -> bool:
        """Return whether only this step reads the result of the one before; if so, that result gets no place."""
        buffer = self._buffers[first.result.buffer]
        alone = buffer.kind == "arena" and buffer.last == step and first.result.shape == second.image.shape
        reads = sum(isinstance(part, Value) and part.buffer == first.result.buffer for part in self._steps[step])
        if not alone or second.image.buffer != first.result.buffer or reads > 1:
            return False
        buffer.kind = "between"
        return True

    def _unite(self) -> set[int]:
        """Let values lie in the concatenations that they are copied to; return the steps that this saves."""
        left_out: set[int] = set()
        for step, value, result, channel in self._parts:
            if value.kind == "arena" and value.movable and value.within is value and value is not result:
                value.within, value.channel = result, channel
                result.first, result.last = min(result.first, value.first), max(result.last, value.last)
                left_out.add(step)
        return left_out

    def _is_pitched(self, value: Value) -> bool:
        """Return whether a value is some channels of all pixels of its buffer, in their order."""
        shape, sizes = tuple(self._buffers[value.buffer].shape), value.shape
        strides = torch.empty(shape, device="meta").stride()
        return len(shape) == 4 and sizes[:3] == shape[:3] and value.layout.stride() == strides

    def _pitch(self, value: Value) -> int | _Buffer:
        """Return the distance between the pixels of images with the channels last."""
        return self._buffers[value.buffer] if self._is_pitched(value) else value.shape[-1]

    def _place(self) -> int:
        """Give each buffer of the arena its offset, and return the arena's size, in elements."""
        placed: list[_Buffer] = []
        end = 0
        # The largest first, each at the lowest place that nothing takes while it lives.
        for buffer in sorted(self._buffers, key=lambda buffer: -buffer.elements):
            if buffer.kind != "arena" or buffer.within is not buffer:
                continue
            others = [other for other in placed if other.first <= buffer.last and buffer.first <= other.last]
            for other in sorted(others, key=lambda other: other.offset):
                if buffer.offset + buffer.elements <= other.offset:
                    break
                buffer.own_offset = max(buffer.offset, other.offset + -(-other.elements // ALIGNMENT) * ALIGNMENT)
            placed.append(buffer)
            end = max(end, buffer.offset + buffer.elements)
        return end

    def _new(self, kind: str, shape: Sequence[int], dtype: torch.dtype) -> Value:
        self._buffers.append(_Buffer(kind, tuple(shape), len(self._steps)))
        return Value(len(self._buffers) - 1, torch.empty(tuple(shape), dtype=dtype, device="meta"))

    def _result(self, shape: Sequence[int]) -> Value:
        return self._new("arena", shape, torch.float32)

    def _step(
        self,
        kind: int,
        numbers: Sequence[int | _Buffer],
        operands: Sequence[int | Value | None],
        products: int = 0,
        *,
        pitched: Sequence[Value] = (),
    ) -> None:
        """Add a step, which knows the pitch of the ``pitched`` operands."""
        for operand in operands:
            if isinstance(operand, Value):
                buffer = self._buffers[operand.buffer]
                buffer.last = len(self._steps)
                if not any(operand is each for each in pitched) or not self._is_pitched(operand):
                    buffer.movable = False
        self._steps.append([kind, *numbers, *operands])
        self._nanoseconds += products / 50  # of one thread, roughly


def _merged(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Return sizes and strides without size 1, with dimensions merged that are contiguous in all operands."""
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for dim, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(known[-1] == operand[dim] * size for known, operand in zip(kept, strides, strict=True)):
            sizes[-1] *= size
            for known, operand in zip(kept, strides, strict=True):
                known[-1] = operand[dim]
        else:
            sizes.append(size)
            for known, operand in zip(kept, strides, strict=True):
                known.append(operand[dim])
    return sizes, kept


def _four(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Return sizes and strides merged or extended to four dimensions."""
    sizes, kept = _merged(shape, strides)
    need(len(sizes) <= 4)
    missing = 4 - len(sizes)
    return [1] * missing + sizes, [[0] * missing + operand for operand in kept]


def _broadcast(*values: Value) -> tuple[int, ...]:
    shape = torch.broadcast_shapes(*(value.shape for value in values))  # type: ignore[no-untyped-call]  # torch's
    return tuple(shape)


def _unknown(*arguments: object) -> list[Tensor]:
    # With fake tensors and on the meta device, a plan has a shape but no numbers.
    raise RuntimeError("fxopt::run: the plan's numbers are not available; run the operators that it was made from")


RUN = Operator("run(Tensor[] inputs, Tensor[] weights, Tensor plan) -> Tensor[]", _unknown)
