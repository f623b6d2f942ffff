"""`QuantizedLinear`: a linear layer with int8 weights, whose input is quantized by rows, or by fixed ranges."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt_core import FxoptError
from fxopt_cpu.operators.rounding import LARGEST, dequantized
from fxopt_rewrite import Watched
from fxopt_rewrite.toolbox import check_settings, needs_gradient, runs_plainly

_ENGINES = ("x86", "fbgemm", "onednn")  # the first that torch was built with
_ENGINE = threading.Lock()  # torch has one for all threads
_LINEAR: Any = getattr(getattr(torch.ops.quantized, "linear_dynamic", None), "default", None)
_STATIC: Any = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
_TAKEN = (torch.float32, torch.bfloat16, torch.float16)


def why_unsupported(dtype: torch.dtype, device: torch.device) -> tuple[str, str] | None:
    """Return why a layer cannot be quantized, as (reason code, predicate of the layer), or None.

    >>> why_unsupported(torch.float64, torch.device("cpu"))
    ('unsupported-dtype', 'is torch.float64; int8 stands in for torch.float32, torch.bfloat16 and torch.float16')
    """
    if device.type not in ("cpu", "meta"):
        return "not-on-cpu", f"is on {device}; the int8 operators only run on the CPU"
    if _LINEAR is None or engine() is None:
        return "no-operators", "cannot be quantized: this build of torch, or this processor, lacks the int8 operators"
    if dtype not in _TAKEN:
        return "unsupported-dtype", f"is {dtype}; int8 stands in for torch.float32, torch.bfloat16 and torch.float16"
    return None


def engine() -> str | None:
    """Return the library of integer products that torch has here; None where it has none."""
    return next((each for each in _ENGINES if each in torch.backends.quantized.supported_engines), None)


@cache
def has_wide_sums() -> bool:
    """Return whether this processor adds products of 8-bit integers without saturation at 16 bits (AVX-512 VNNI).

    Without it, inputs are rounded to 7 bits, so that the sum of two products fits.
    """
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    return supported is not None and bool(supported())


@contextmanager
def _chosen_engine() -> Iterator[None]:
    with _ENGINE:
        former = torch.backends.quantized.engine
        torch.backends.quantized.engine = engine()  # type: ignore[assignment]  # a property of a module object
        try:
            yield
        finally:
            torch.backends.quantized.engine = former


class _Packing:
    """The packed form of a layer's weight: made at its first call, never copied or saved.

    Attributes:
        packed: what the operator takes; None at first.
        sums: (out,), those of the rows of the weight; with fixed ranges, each times the shifts of the input.
        halved: whether inputs are rounded to 7 bits.
    """

    __slots__ = ("_made_of", "halved", "packed", "sums")

    def __init__(self) -> None:
        self.packed: Any = None
        self.sums = torch.empty(0)
        self.halved = False
        self._made_of: Watched | None = None

    def is_of(self, *tensors: Tensor) -> bool:
        """Return whether it was made of these tensors, which have not changed since."""
        return self._made_of is not None and self._made_of.hold(tensors)

    def keep(self, packed: Any, weight: Tensor, scale: Tensor, *rounding: Tensor) -> None:
        """Keep what was packed of these tensors."""
        self.packed, self.halved = packed, not has_wide_sums()
        self.sums = scale * (weight.float() @ rounding[0][1] if rounding else weight.sum(1))
        self._made_of = Watched((weight, scale, *rounding))


class QuantizedLinear(nn.Module):
    """``x @ (scale * weight).T + bias``, with ``x`` rounded to 8 bits: one scale and zero point for each row of it.

    A row ``r`` from ``low`` to ``high`` is ``low + (high - low) * s``, with ``s`` from 0 to 1, and the product is
    ``(high - low) * (s @ W.T) + low * W.sum(1) + bias``. The operator rounds ``s`` of all rows by the same scale, so
    that no row changes the result of another. Without AVX-512 VNNI, it rounds to 7 bits.

    ``x`` is (..., in_features), of float32, bfloat16 or float16, and so is the result. ``weight`` (out_features,
    in_features) holds integers, ``scale`` (out_features,) is float32; both are buffers. They are packed at the first
    call, and again when they change; state_dicts hold them plain.

    Where it has a buffer ``rounding`` (2, in_features), factors and shifts take the place of a row's own scale: the
    product is that of ``round(x * factor + shift) - shift``, where rounded numbers are at most 127, and the weight was
    divided by the factors.

    Inputs with NaN or infinite values, and calls while a graph is recorded or under autocast, take the product with the
    dequantized weight. So do other devices and dtypes. The layer has no derivative: a backward pass through it is an
    error.

    Args:
        in_features: size of the input's last dimension.
        out_features: size of the result's last dimension.
        bias: whether it has a bias.
        static: whether it has ``rounding``.

    >>> layer = QuantizedLinear(2, 1, bias=False)
    >>> layer.weight.copy_(torch.tensor([[127, -127]])), layer.scale.fill_(1 / 127)
    (tensor([[ 127, -127]], dtype=torch.int8), tensor([0.0079]))
    >>> layer(torch.tensor([[1.0, 3.0], [3.0, 3.0]])).round()
    tensor([[-2.],
            [ 0.]])
    """

    __slots__ = ("_packing",)
    only_computes = True
    integer_weight = True  # as `fxopt_rewrite.read_integer_linear` reads it
    own_parameters: ClassVar = frozenset({"bias", "original_weight"})
    own_buffers: ClassVar = frozenset({"weight", "scale", "rounding"})

    weight: Tensor
    scale: Tensor
    rounding: Tensor
    bias: nn.Parameter | None
    original_weight: nn.Parameter | None
    """The weight before, where the pass was told to keep it."""
    _packing: _Packing

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        static: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=torch.int8, device=device))
        self.register_buffer("scale", torch.ones(out_features, device=device))
        if static:
            self.register_buffer("rounding", torch.ones(2, in_features, device=device))
        own_bias = nn.Parameter(torch.zeros(out_features, device=device)) if bias else None
        self.register_parameter("bias", own_bias)

    def check_attributes(self) -> None:
        """Raise a ValueError where a file has set what no operator takes."""
        check_settings(self, in_features=0, out_features=0)

    def forward(self, input: Tensor) -> Tensor:
        """Return the result for an input."""
        if type(input) is not Tensor or input.dtype not in _TAKEN or not runs_plainly():
            return self._plain(input)
        if needs_gradient(input, self._parameters["bias"]):
            result: Tensor = _WithoutDerivative.apply(input, self._parameters["bias"], self)  # type: ignore[no-untyped-call]  # so it is in torch
            return result
        return self._fast(input)

    def _fast(self, input: Tensor) -> Tensor:
        """Return the integer product, where the input and the weight are fit for it."""
        weight, scale, rounding = (self._buffers.get(key) for key in ("weight", "scale", "rounding"))
        packing = self.packing
        if weight is None or scale is None or not input.is_cpu or input.layout is not torch.strided:
            return self._plain(input)
        bias, shape = self._parameters["bias"], input.shape
        made_of = (weight, scale) if rounding is None else (weight, scale, rounding)
        if weight.is_inference() or (not packing.is_of(*made_of) and not self._pack(*made_of)):
            return self._plain(input)
        if len(shape) == 1:
            return self._fast(input.unsqueeze(0)).squeeze(0)
        if not shape or shape[-1] != self.in_features or not input.numel():
            return self._plain(input)
        wide = input if input.dtype is torch.float32 else input.float()
        if rounding is not None:
            return self._by_ranges(input, wide, rounding)
        low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)  # 10 times as fast as `aminmax` there
        size = high.sub_(low).clamp_min_(torch.finfo(torch.float32).tiny)
        if not math.isfinite(size.sum()):
            return self._plain(input)  # the operator loses NaN
        result: Tensor = _LINEAR((wide - low).div_(size), packing.packed, packing.halved)
        result = result.mul_(size) if bias is None else torch.addcmul(bias.float(), result, size)
        result.addcmul_(low, packing.sums)
        return result if input is wide else result.to(input.dtype)

    def _by_ranges(self, input: Tensor, wide: Tensor, rounding: Tensor) -> Tensor:
        """Return the product with an input that is rounded by factors and shifts."""
        factor, shift = rounding
        if not math.isfinite(wide.sum()) and not wide.isfinite().all():
            return self._plain(input)
        step, zero = (2.0, 64) if self.packing.halved else (1.0, 128)
        steps = torch.addcmul(shift, wide, factor).clamp_(-LARGEST, LARGEST)
        result: Tensor = _STATIC(steps, step, zero, self.packing.packed)
        result -= self.packing.sums
        result = result if self.bias is None else result.add_(self.bias)
        return result if input is wide else result.to(input.dtype)

    @property
    def packing(self) -> _Packing:
        """What this layer has packed; empty at first."""
        try:
            return self._packing
        except AttributeError:
            self._packing = _Packing()
            return self._packing

    def forget_derived(self) -> None:
        """Drop the packed weight; the next call makes it again."""
        self._packing = _Packing()

    def _pack(self, weight: Tensor, scale: Tensor, *rounding: Tensor) -> bool:
        """Pack the weight, where that is possible, and changes of it can be noticed; return whether it was."""
        fit = not any(each.is_inference() or not each.is_cpu for each in (weight, scale, *rounding))
        if engine() is None or not weight.numel() or not fit:
            return False
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        with torch.no_grad(), _chosen_engine(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch announces that its quantized tensors will go
            made = torch._make_per_channel_quantized_tensor(weight, scale.double(), zeros, 0)
            packed = torch.ops.quantized.linear_prepack(made, None)
            self.packing.keep(packed, weight, scale, *rounding)
        return True

    def _plain(self, input: Tensor) -> Tensor:
        """Return the product with the dequantized weight."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        rounding = self._buffers.get("rounding")
        input = input if rounding is None else input * rounding[0].to(input.dtype)
        return F.linear(input, dequantized(self.weight, self.scale, input.dtype), bias)

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedLinear:
        """Convert and move the bias, and move scale and rounding, which stay in float32."""
        kept = {key: tensor for key, tensor in self._buffers.items() if tensor is not None}
        self.forget_derived()
        applied: QuantizedLinear = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        for key, tensor in kept.items():
            moved = self._buffers[key]
            if moved is not None and moved.dtype != tensor.dtype:
                self._buffers[key] = tensor.to(moved.device)
        return applied

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes alone, to be copied and saved."""
        return dict(vars(self))

    def extra_repr(self) -> str:
        """Return the settings in the form of ``nn.Linear``."""
        shown = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{shown}, static" if "rounding" in self._buffers else shown


class _WithoutDerivative(torch.autograd.Function):
    """The product in a call that autograd records: its derivative is an error, not a silent None."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, layer: QuantizedLinear) -> Tensor:
        """Compute without recording."""
        return layer._fast(input)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Refuse."""
        raise FxoptError(
            "a QuantizedLinear has no derivative, neither by its input nor by its bias: its weight is rounded to 8 "
            "bits, and so is its input. Train the original model, and quantize it afterwards"
        )
