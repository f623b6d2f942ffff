"""`PackedLinear`: a linear layer and an activation in one oneDNN operator, with a packed weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxopt_cpu.layers.activations import NONE, SLOW_IN_LINEAR, Activation
from fxopt_cpu.layers.packed_layer import PackedLayer, bias_fits, runs_by_onednn
from fxopt_cpu.operators.onednn import LINEAR, ONLY_AVX2, pack_linear, why_unsupported
from fxopt_rewrite.toolbox import check_settings, is_plain_tensor, needs_gradient

_FEWEST_ROWS = 2  # a product with one row is bound by reading the weight, and as fast in torch itself
_MANY_ROWS = 64
_HAS_MKL: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]  # untyped in torch
MKL_IS_FASTER = _HAS_MKL and ONLY_AVX2
"""Whether MKL, which torch calls, is the faster one for many rows and results not wider than inputs.

With AVX2 alone, the packed product of (512, 3072) and (3072, 768) takes 1.19 times as long, that of (64, 1536) and
(1536, 384) 1.08 times.
"""


class PackedLinear(PackedLayer):
    """``activation(x @ weight.T + bias)``.

    ``x`` is (..., in_features), ``weight`` (out_features, in_features), ``bias`` (out_features,). As in `PackedConv2d`,
    the parameters are plain, the first call that needs a packed copy makes it, and whatever the operator does not take
    goes to torch's own ``linear``. So does an input of a single row, and one of many rows where MKL is faster.

    Args:
        in_features: size of the input's last dimension.
        out_features: size of the result's last dimension.
        bias: whether it has a bias.
        activation: the activation of the product.

    >>> linear = PackedLinear(2, 1, bias=False, activation=Activation("relu"))
    >>> with torch.no_grad():
    ...     _ = linear.weight.copy_(torch.tensor([[1.0, -1.0]]))
    ...     linear(torch.tensor([[1.0, 3.0], [3.0, 1.0]]))
    tensor([[0.],
            [2.]])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        activation: Activation = NONE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__((out_features, in_features), activation, bias=bias, device=device, dtype=dtype)
        self.in_features, self.out_features = in_features, out_features

    def check_attributes(self) -> None:
        """Raise a ValueError where a file has set what no operator takes."""
        super().check_attributes()
        check_settings(self, in_features=0, out_features=0)

    def forward(self, input: Tensor) -> Tensor:
        """Return the result for an input."""
        if not runs_by_onednn():
            return self._plain(input)
        parameters = self._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if weight is None or not is_plain_tensor(input, weight.dtype):
            return self._plain(input)
        if needs_gradient(input, weight, bias):
            self.packing.forget_trained(weight)
            return self._plain(input)
        if input.dim() < 2 or input.shape[-1] != self.in_features or input.numel() < _FEWEST_ROWS * self.in_features:
            return self._plain(input)
        widens = self.out_features > self.in_features
        if MKL_IS_FASTER and not widens and input.numel() >= _MANY_ROWS * self.in_features:
            return self._plain(input)
        packed = self.packing.packed(weight, bias)
        if packed is None:
            packed = self._pack(weight, bias, input)
        if packed is None or input.numel() == 0:
            return self._plain(input)
        return run_linear(input, packed, bias, self._unary)

    def _plain(self, input: Tensor) -> Tensor:
        """Return the result of torch's own functions."""
        return self.activation(F.linear(input, self.weight, self.bias))

    def by_torch(self) -> Callable[..., Tensor]:
        """Return a function that computes the same with torch's own, the current weights as constants."""
        weight, bias = self.weight.detach(), None if self.bias is None else self.bias.detach()
        activation = self.activation
        return lambda input: activation(F.linear(input, weight, bias))

    def _pack(self, weight: Tensor, bias: Tensor | None, input: Tensor) -> Tensor | None:
        """Pack the weight, if this processor has the operators and changes of the weight can be noticed."""
        self.packing.clear()
        unfit = weight.shape != (self.out_features, self.in_features) or not bias_fits(bias, weight)
        if unfit or weight.is_inference() or not weight.is_cpu or weight.numel() == 0:
            return None
        if why_unsupported(weight.dtype, weight.device) is not None:
            return None
        return self.packing.keep(weight, bias, pack_linear(weight, input.numel() // self.in_features))

    def extra_repr(self) -> str:
        """Return the settings in the form of ``nn.Linear``."""
        shown = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return shown if self.activation == NONE else f"{shown}, activation={self.activation}"


def run_linear(input: Tensor, packed: Tensor, bias: Tensor | None, unary: tuple[Any, ...]) -> Tensor:
    """Return the activation of a product with a packed weight: in one call, where that is as right and not slower."""
    activation = Activation(*unary)
    if activation.name in SLOW_IN_LINEAR or activation.alters_extremes:
        return activation.apply_(LINEAR(input, packed, bias, *NONE))
    result: Tensor = LINEAR(input, packed, bias, *unary)
    return result
