"""`PanelLinear`: a linear layer, and what follows it, in one operator, with its weight kept as panels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt_cpu.layers.epilogue import CODES, NORM_CODES, Activation, Norm, check_epilogue
from fxopt_cpu.layers.packed_layer import PackedLayer
from fxopt_cpu.layers.thawing import Thawing
from fxopt_cpu.operators.definition import without_gradient
from fxopt_cpu.operators.linear import pack, unpack
from fxopt_rewrite import check_settings, is_plain_tensor, needs_gradient, runs_plainly

LINEAR: Callable[..., Tensor] = without_gradient(torch.ops.fxopt.linear.default)
_FLOAT = torch.float32
_HALVES = (torch.bfloat16, torch.float16)
_SMALL = ("bias", "norm_weight", "norm_bias")


class PanelLinear(PackedLayer):
    """``norm(activation(x @ weight.T + bias) + residual)``, or ``activation(x @ gate.T) * (x @ up.T)``.

    ``x`` is (..., in_features), ``weight`` (out_features, in_features) in float32 or bfloat16, a parameter, or in int8,
    a buffer beside ``scale`` (out_features,). In int8, inputs are rounded row by row, or by a buffer ``rounding``
    (2, in_features): ``x * factor + shift``. A gated layer has the rows of both factors in its weight, the gate's
    first, and ``out_features`` counts both. Inputs and results are float32; those of a layer in int8 may be bfloat16 or
    float16, too.

    The first call that computes without gradients packs the weight. What the operator does not take goes to torch's
    functions: other dtypes and devices, gradients, tracing, modes.

    Args:
        in_features: size of the input's last dimension.
        out_features: number of rows of the weight.
        bias: whether it has a bias.
        activation: name and numbers of the activation, as `Activation` has them.
        gated: whether the result is the product of two halves.
        norm: name and eps of the norm at the end, as `Norm` has them.
        norm_weight: whether the norm has a weight.
        norm_bias: whether the norm has a bias.
        integers: whether the weight holds integers.
        rounding: whether inputs are rounded by factors and shifts.

    >>> linear = PanelLinear(2, 1, bias=False, activation=("relu",))
    >>> with torch.no_grad():
    ...     _ = linear.weight.copy_(torch.tensor([[1.0, -1.0]]))
    ...     linear(torch.tensor([[1.0, 3.0], [3.0, 1.0]]))
    tensor([[0.],
            [2.]])
    """

    __slots__ = ()
    floats = (torch.float32, torch.bfloat16)
    own_parameters: ClassVar = frozenset({"weight", "bias", "norm_weight", "norm_bias", "original_weight"})
    own_buffers: ClassVar = frozenset({"weight", "scale", "rounding"})

    weight: Any
    norm_weight: nn.Parameter | None
    norm_bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        activation: tuple[Any, ...] = (),
        gated: bool = False,
        norm: tuple[Any, ...] = (),
        norm_weight: bool = False,
        norm_bias: bool = False,
        integers: bool = False,
        rounding: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.gated = gated
        self._activation = tuple(Activation(*activation))
        self._norm: tuple[Any, ...] = tuple(Norm(*norm))
        if integers:
            self.add_integers(rounding=rounding, device=device)
        else:
            self.weight = nn.Parameter(torch.zeros(self.weight_shape, device=device, dtype=dtype))
        for key, size, given in (
            ("bias", out_features, bias),
            ("norm_weight", self.features, norm_weight),
            ("norm_bias", self.features, norm_bias),
        ):
            self.register_parameter(key, nn.Parameter(torch.zeros(size, device=device, dtype=dtype)) if given else None)

    def check_attributes(self) -> None:
        """Raise a ValueError if a file has set values that no operator takes."""
        check_settings(self, in_features=0, out_features=0, gated=bool)
        check_epilogue(self.activation, self.norm)
        if self.gated and self.out_features % 2:
            raise ValueError(f"out_features is {self.out_features}, expected an even number for a gated layer")

    @property
    def features(self) -> int:
        """Size of the result's last dimension."""
        return self.out_features // self.parts

    @property
    def norm(self) -> Norm:
        """The norm at the end."""
        return Norm(*self._norm)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the result for an input, and the value that is added before the norm."""
        if "scale" in self._buffers and type(input) is Tensor and input.dtype in _HALVES:
            return self.forward(input.float(), None if residual is None else residual.float()).to(input.dtype)
        plain = not runs_plainly() or not is_plain_tensor(input, _FLOAT)
        if plain or (torch.is_grad_enabled() and self._records(input, residual)):
            return self._plain(input, residual)
        fits = input.shape[-1:] == (self.in_features,)
        if residual is not None:  # the operator does not broadcast
            fits &= is_plain_tensor(residual, _FLOAT) and residual.shape == (*input.shape[:-1], self.features)
        operands = self.operands() if fits else None
        if operands is None:
            return self._plain(input, residual)
        panels, (bias, scale, sums, rounding, norm_weight, norm_bias) = operands
        (activation, alpha, beta), (norm, eps) = self._activation, self._norm
        return LINEAR(
            input, panels, scale, sums, bias, self.features, CODES[activation], alpha, beta, residual,
            NORM_CODES[norm], norm_weight, norm_bias, eps, self.gated, rounding,
        )  # fmt: skip

    def _records(self, input: Tensor, residual: Tensor | None) -> bool:
        """Return whether autograd would record a call."""
        packed, held = self.panels, self._parameters
        # Reading `requires_grad` of a dropped weight would restore it, so the panels have a copy of the flag.
        # `dict.values` restores nothing.
        if packed is not None and packed.trains and isinstance(held, Thawing) and held.frozen:
            return True
        return needs_gradient(input, residual, *dict.values(held))

    def operands(self) -> tuple[Tensor, tuple[Tensor | None, ...]] | None:
        """Return panels, bias, scale, sums, rounding and the norm's weight and bias as the operator takes them.

        None where the layer cannot be packed. The weight is packed if it has not been, or has changed since.
        """
        packed = self.packed()
        if packed is None:
            return None
        held: Any = self._parameters
        bias, *of_norm = (_as_float(dict.get(held, key)) for key in _SMALL)
        return packed.panels, (bias, packed.scale, packed.sums, packed.rounding, *of_norm)

    @property
    def weight_shape(self) -> tuple[int, int]:
        """The shape that the weight has to have."""
        return self.out_features, self.in_features

    @property
    def parts(self) -> int:
        """How many matrices the weight consists of, each padded separately."""
        return 1 + self.gated

    def _in_panels(self, weight: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        panels = torch.cat([pack(part) for part in weight.chunk(self.parts)])
        return panels, partial(_weight, panels, self.parts, self.features, self.in_features)

    def _plain(self, input: Tensor, residual: Tensor | None) -> Tensor:
        """Compute the result with torch's own functions."""
        weight, bias = self.weight, self.bias
        scale = self.scale if "scale" in self._buffers else None
        wide = weight.to(input.dtype) if scale is None else (weight.float() * scale.unsqueeze(1)).to(input.dtype)
        if "rounding" in self._buffers:
            # The weight was divided by these factors before it was rounded.
            input = input * self.rounding[0].to(input.dtype)
        product = F.linear(input, wide, None if bias is None else bias.to(input.dtype))
        if self.gated:
            gate, up = product.chunk(2, -1)
            product = self.activation(gate) * up
        else:
            product = self.activation(product)
        return self.norm(product if residual is None else product + residual, self.norm_weight, self.norm_bias)

    def extra_repr(self) -> str:
        """Return the settings in the form of ``nn.Linear``."""
        shown = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        if self.activation != Activation():
            shown += f", activation={self.activation}"
        if self.norm.name != "none":
            shown += f", norm={self.norm.name}"
        if "rounding" in self._buffers:
            shown += ", static"
        return f"{shown}, gated=True" if self.gated else shown


def _as_float(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor.dtype is _FLOAT else tensor.detach().float()


def _weight(panels: Tensor, parts: int, features: int, inputs: int) -> Tensor:
    """Return the plain weight: the rows of one matrix, or of two, one after the other."""
    rows = [unpack(part, features, inputs) for part in panels.chunk(parts)]
    return rows[0] if parts == 1 else torch.cat(rows)
