"""Activations and norms that operators apply after a product: their names, codes and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxopt_cpu.operators.linear import ACTIVATIONS, NORMS, activate, normalize
from fxopt_rewrite import LayerNormCall, check_settings

#: The numbers of activations in the operators.
CODES = {name: number for number, name in enumerate(ACTIVATIONS)}
#: The numbers of norms in the operators.
NORM_CODES = {name: number for number, name in enumerate(NORMS)}


class Activation(NamedTuple):
    """An activation, as operators take it.

    Attributes:
        name: that of torch's function, or "none".
        alpha: its first number, or 0.
        beta: its second number, or 0.
    """

    name: str = "none"
    alpha: float = 0.0
    beta: float = 0.0

    def __call__(self, value: Tensor) -> Tensor:
        """Apply it with torch's own function.

        >>> import torch
        >>> Activation("hardtanh", 0.0, 6.0)(torch.tensor([-1.0, 7.0]))
        tensor([0., 6.])
        """
        return activate(value, CODES[self.name], self.alpha, self.beta)

    def __str__(self) -> str:
        """Return its name and numbers."""
        return self.name if self == (self.name, 0.0, 0.0) else f"{self.name}({self.alpha:g}, {self.beta:g})"


NONE = Activation()


def activation_named(name: str, settings: Mapping[str, Any]) -> Activation | None:
    """Return an activation by the operation and the settings that `read_activation` gives; None if there is none.

    >>> activation_named("clamp", {"min": 0, "max": 6}), activation_named("softplus", {})
    (Activation(name='hardtanh', alpha=0.0, beta=6.0), None)
    """
    numbers = [float(value) for value in settings.values() if type(value) in (int, float)]
    if name == "gelu":
        return {"none": Activation("gelu"), "tanh": Activation("gelu_tanh")}.get(settings.get("approximate", ""))
    if name == "relu6":
        return Activation("hardtanh", 0.0, 6.0)
    if name in ("clamp", "hardtanh") and len(numbers) == 2:
        return Activation("hardtanh", *numbers)
    # `clamp(max=0)` has the same `numbers`, but is not a ReLU.
    if name in ("clamp", "clamp_min") and numbers == [0.0] and settings.get("min") is not None:
        return Activation("relu")
    if name in ACTIVATIONS and len(numbers) == len(settings) <= 1:
        return Activation(name, *numbers)
    return None


class Norm(NamedTuple):
    """A norm over the last dimension.

    Attributes:
        name: "layer", "rms" or "none".
        eps: added to the variance, or to the mean of squares.
    """

    name: str = "none"
    eps: float = 0.0

    def __call__(self, value: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Apply it with torch's own function."""
        return normalize(value, NORM_CODES[self.name], weight, bias, self.eps)


NO_NORM = Norm()


def norm_like(call: LayerNormCall) -> Norm:
    """Return the norm that a call computes, over the last dimension."""
    # The default of torch's RMS norm for float32.
    eps = torch.finfo(torch.float32).eps if call.eps is None else call.eps
    return Norm("layer" if call.centred else "rms", eps)


def check_epilogue(activation: Activation, norm: Norm) -> None:
    """Raise a ValueError if a file names an unknown activation or norm."""
    check_settings(activation, alpha=float, beta=float)
    check_settings(norm, eps=float)
    if activation.name not in CODES or norm.name not in NORM_CODES:
        raise ValueError(f"{activation.name!r:.40} and {norm.name!r:.40} are not a known activation and norm")
