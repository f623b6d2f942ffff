"""`fxopt::linear`: `norm(activation(input @ weight.T + bias) + residual)`, its weight packed in panels.

A panel holds 16 columns of the product, which are 16 rows of the weight, step by step along `in`; the last one is
padded with zeros. The same panels serve every instruction set:

    float32     (panels, in, 16)
    bfloat16    (panels, in / 2, 16, 2)
    int8        (panels, in / 4, 16, 4), with a scale and a sum of integers for each column

For int8 panels, inputs are rounded to integers too: each row with its own scale, from its largest magnitude, or all
rows by `rounding` (2, in), `round(input * factor + shift) - shift`. Then `sums` continues with the sums of the integers
times the shifts, which are whole numbers.

With `gated`, the panels of the gate come first and those of its factor after them, each padded separately, and the
result is `activation(gate) * factor`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fxopt_cpu.operators.definition import Operator

#: Columns of a panel, the same for every instruction set: `limit_isa` may choose another one after layers were packed.
PANEL = 16
LARGEST = 127  # of the integers of a weight, or of an input
# How many elements of a row of the weight lie side by side.
# One step of a panel then takes 64 bytes in every dtype.
TOGETHER = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}
NORMS = ("none", "layer", "rms")

# In the order of `Activation` in csrc/math.h.
_ACTIVATIONS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "none": lambda x, alpha, beta: x,
    "relu": lambda x, alpha, beta: F.relu(x),
    "gelu": lambda x, alpha, beta: F.gelu(x),
    "gelu_tanh": lambda x, alpha, beta: F.gelu(x, approximate="tanh"),
    "silu": lambda x, alpha, beta: F.silu(x),
    "tanh": lambda x, alpha, beta: torch.tanh(x),
    "sigmoid": lambda x, alpha, beta: torch.sigmoid(x),
    "hardswish": lambda x, alpha, beta: F.hardswish(x),
    "hardtanh": lambda x, alpha, beta: F.hardtanh(x, alpha, beta),
    "hardsigmoid": lambda x, alpha, beta: F.hardsigmoid(x),
    "leaky_relu": lambda x, alpha, beta: F.leaky_relu(x, alpha),
    # A faster approximation of GELU from https://arxiv.org/abs/1606.08415; CLIP uses it.
    "quick_gelu": lambda x, alpha, beta: x * torch.sigmoid(1.702 * x),
    "elu": lambda x, alpha, beta: F.elu(x, alpha),
    "mish": lambda x, alpha, beta: F.mish(x),
}
# The operators' argument `activation` is the index in this tuple.
ACTIVATIONS = tuple(_ACTIVATIONS)


def activate(value: Tensor, activation: int, alpha: float, beta: float) -> Tensor:
    """Return the activation with this code, computed with torch's operators.

    Example:
        >>> activate(torch.tensor([-1.0, 9.0]), ACTIVATIONS.index("hardtanh"), 0.0, 6.0)
        tensor([0., 6.])
    """
    return _ACTIVATIONS[_named(ACTIVATIONS, activation)](value, alpha, beta)


def _named(names: tuple[str, ...], number: int) -> str:
    if not 0 <= number < len(names):
        raise RuntimeError(f"fxopt: found {number} for one of {', '.join(names)}, expected 0 to {len(names) - 1}")
    return names[number]


def normalize(value: Tensor, kind: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return the norm with this code (`NORMS`) over the last dimension."""
    name = _named(NORMS, kind)
    if name == "layer":
        return F.layer_norm(value, value.shape[-1:], weight, bias, eps)
    if name == "rms":
        value = F.rms_norm(value, value.shape[-1:], weight, eps)
        return value if bias is None else value + bias
    return value


def pack(weight: Tensor) -> Tensor:
    """Return the panels of a weight (out, in) in float32, bfloat16 or int8, in the weight's dtype.

    Example:
        >>> weight = torch.randn(20, 6)
        >>> panels = pack(weight)
        >>> panels.shape
        torch.Size([2, 6, 16])
        >>> torch.equal(unpack(panels, 20, 6), weight)
        True
    """
    together = TOGETHER[weight.dtype]
    features, depth = weight.shape
    panels, steps = -(-features // PANEL), -(-depth // together)
    padded = weight.new_zeros(panels * PANEL, steps * together)
    padded[:features, :depth] = weight
    packed = padded.view(panels, PANEL, steps, together).transpose(1, 2).contiguous()
    return packed.squeeze(-1) if together == 1 else packed


def unpack(panels: Tensor, features: int, depth: int) -> Tensor:
    """Return the weight (features, depth) that was packed, bit for bit."""
    rows = panels.view(*panels.shape[:3], TOGETHER[panels.dtype]).transpose(1, 2)
    return rows.reshape(panels.shape[0] * PANEL, -1)[:features, :depth].contiguous()


def quantize(weight: Tensor, *, transposed: bool = False) -> tuple[Tensor, Tensor]:
    """Return the integers (out, in, ...) of a weight, and one scale for each of its outputs (out,), in float32.

    ``weight[i, j]`` is about ``scale[i] * integer[i, j]``, with ``scale[i]`` the largest magnitude in row ``i`` divided
    by 127, and integers from -127 to 127: no zero point, so that zero is exact. Key maps name this function.

    Args:
        weight: (out, in), or (out, in, height, width) of a convolution.
        transposed: whether it is (in, out) instead.

    Example:
        >>> integers, scale = quantize(torch.tensor([[-2.54, 1.27], [0.0, 0.0]]))
        >>> integers
        tensor([[-127,   64],
                [   0,    0]], dtype=torch.int8)
    """
    plain = weight.detach().t() if transposed else weight.detach()
    rows = plain.flatten(1)
    # `amax` raises an error for rows without elements.
    largest = rows.abs().amax(1).float() if rows.shape[1] else rows.new_zeros(len(rows)).float()
    # A row of zeros has scale 1, to avoid dividing by 0; `tiny` keeps the quotient of very small rows above 0.
    scale = torch.where(largest > 0, largest / LARGEST, 1.0).clamp_min(torch.finfo(torch.float32).tiny)
    integers = (plain.float() / scale.view(-1, *[1] * (plain.dim() - 1))).round_().clamp_(-LARGEST, LARGEST)
    return integers.to(torch.int8).contiguous(), scale


def padded_scale(scale: Tensor, parts: int = 1) -> Tensor:
    """Return the scales of columns, with zeros for those that pad the last panel of each part."""
    rows = scale.detach().view(parts, -1)
    return F.pad(rows, (0, -rows.shape[1] % PANEL)).flatten()


def plain_scale(padded: Tensor, parts: int, features: int) -> Tensor:
    """Return the scales that were padded, with so many features in each part."""
    return padded.view(parts, -1)[:, :features].flatten().clone()


def sums_of(panels: Tensor) -> Tensor:
    """Return the sums of each column's integers."""
    return panels.sum((1, 3), dtype=torch.int32).flatten()


def shifted_sums(panels: Tensor, shift: Tensor) -> Tensor:
    """Return the sums of each column's integers times the shifts of the inputs, which are whole numbers."""
    padded = torch.zeros(panels.shape[1] * TOGETHER[torch.int8], dtype=torch.int32)
    padded[: len(shift)] = shift.to(torch.int32)
    return (panels.to(torch.int32) * padded.view(-1, 1, TOGETHER[torch.int8])).sum((1, 3), dtype=torch.int32).flatten()


def _reference(
    input: Tensor,
    panels: Tensor,
    scale: Tensor | None,
    sums: Tensor | None,
    bias: Tensor | None,
    features: int,
    activation: int,
    alpha: float,
    beta: float,
    residual: Tensor | None,
    norm: int,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    gated: bool,
    rounding: Tensor | None,
) -> Tensor:
    """Compute the product with torch's operators, with the kernel's rounding of rows to bfloat16 or int8."""
    depth, halves, dtype = input.shape[-1], 1 + gated, input.dtype
    # Inputs stay in float32 until here: with casts between layers, attention would run in bfloat16, and masks could
    # become infinite.
    rows = input.to(torch.bfloat16).to(dtype) if panels.dtype == torch.bfloat16 else input
    weight = torch.cat([unpack(part, features, depth) for part in panels.chunk(halves)]).to(dtype)
    if panels.dtype == torch.int8:
        assert scale is not None
        # Rows with NaN or infinity have no scale: they are multiplied unrounded.
        largest = input.abs().amax(-1, keepdim=True) if depth else input.new_zeros(*input.shape[:-1], 1)
        finite = largest.isfinite()
        if rounding is None:
            row_scale = torch.where(finite & (largest > 0), largest / 127, 1.0)
            rounded = (input / row_scale).round().clamp(-127, 127) * row_scale
        else:
            factor, shift = rounding.to(dtype)
            # The weight was divided by the factors before it was rounded, so unrounded rows are multiplied by them.
            input = input * factor
            rounded = (input + shift).round().clamp(-127, 127) - shift
        rows = torch.where(finite, rounded, input)
        weight = weight * plain_scale(scale.to(dtype), halves, features)[:, None]
    value = F.linear(rows, weight, None if bias is None else bias.to(dtype))
    if gated:
        gate, factor = value[..., :features], value[..., features:]
        value = activate(gate, activation, alpha, beta) * factor
    else:
        value = activate(value, activation, alpha, beta)
    value = value if residual is None else value + residual
    return normalize(value, norm, norm_weight, norm_bias, eps)


LINEAR = Operator(
    "linear(Tensor input, Tensor panels, Tensor? scale, Tensor? sums, Tensor? bias, int features, int activation,"
    " float alpha, float beta, Tensor? residual, int norm, Tensor? norm_weight, Tensor? norm_bias, float eps,"
    " bool gated, Tensor? rounding) -> Tensor",
    _reference,
)
