"""Element-wise operations that oneDNN computes with the layer before them, as every form of graph calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from fxopt_cpu.operators.onednn import ONLY_AVX2
from fxopt_rewrite import ActivationCall, GraphIndex, read_activation
from fxopt_rewrite.toolbox import check_settings


class Activation(NamedTuple):
    """An element-wise function of oneDNN, as its operators take it.

    Attributes:
        name: its name in oneDNN; "none" for none.
        scalars: its constants.
        algorithm: which of its variants; "" where there is only one.
    """

    name: str = "none"
    scalars: tuple[float, ...] = ()
    algorithm: str = ""

    def __call__(self, value: Tensor) -> Tensor:
        """Apply it with torch's own function.

        >>> Activation("hardtanh", (0.0, 6.0))(torch.tensor([-1.0, 7.0]))
        tensor([0., 6.])
        """
        return _APPLIED[self.name](value, self.scalars, self.algorithm, False)

    def apply_(self, value: Tensor) -> Tensor:
        """Apply it in place with torch's own function."""
        return _APPLIED[self.name](value, self.scalars, self.algorithm, True)

    @property
    def hides_nan(self) -> bool:
        """Whether oneDNN makes a number of NaN: ReLU of it is 0, hardsigmoid 1."""
        return self.name in ("relu", "hardtanh", "hardsigmoid")

    @property
    def alters_extremes(self) -> bool:
        """Whether oneDNN computes NaN, infinity or numbers above 1e37 otherwise than torch.

        Besides those that hide NaN, that is hardswish: of 3e38 it is 3e38, and infinity in torch. GELU by the error
        function makes NaN of infinity in both: torch calls oneDNN for contiguous numbers.
        """
        return self.hides_nan or self.name == "hardswish"

    def __str__(self) -> str:
        """Return its name and its constants."""
        numbers = ", ".join(map(str, (*self.scalars, self.algorithm) if self.algorithm else self.scalars))
        return f"{self.name}({numbers})" if numbers else self.name


def check_activation(activation: Activation) -> None:
    """Raise a ValueError where a file has set an activation that there is not."""
    name, numbers, algorithm = activation
    check_settings(activation, scalars=(float, ...))
    count = {"hardtanh": 2, "leaky_relu": 1}.get(name, 0)
    algorithms = ("none", "tanh") if name == "gelu" else ("",)
    if name not in _APPLIED or len(numbers) != count or algorithm not in algorithms:
        raise ValueError(f"{tuple(activation)!r:.60} is no activation")


NONE, RELU, RELU6 = Activation(), Activation("relu"), Activation("hardtanh", (0.0, 6.0))

_APPLIED: Mapping[str, Callable[[Tensor, tuple[float, ...], str, bool], Tensor]] = {
    "none": lambda value, numbers, algorithm, inplace: value,
    "relu": lambda value, numbers, algorithm, inplace: F.relu(value, inplace),
    "hardtanh": lambda value, numbers, algorithm, inplace: F.hardtanh(value, numbers[0], numbers[1], inplace),
    "hardswish": lambda value, numbers, algorithm, inplace: F.hardswish(value, inplace),
    "hardsigmoid": lambda value, numbers, algorithm, inplace: F.hardsigmoid(value, inplace),
    "swish": lambda value, numbers, algorithm, inplace: F.silu(value, inplace),
    "sigmoid": lambda value, numbers, algorithm, inplace: value.sigmoid_() if inplace else torch.sigmoid(value),
    "tanh": lambda value, numbers, algorithm, inplace: value.tanh_() if inplace else torch.tanh(value),
    "gelu": lambda value, numbers, algorithm, inplace: _GELU[inplace](value, approximate=algorithm),
    "leaky_relu": lambda value, numbers, algorithm, inplace: F.leaky_relu(value, numbers[0], inplace),
}
_GELU: tuple[Callable[..., Tensor], ...] = (F.gelu, torch.ops.aten.gelu_.default)

SLOW_IN_LINEAR = frozenset({"gelu", "swish", "tanh"}) if ONLY_AVX2 else frozenset()
"""Activations that the linear operator computes slower than torch's own function after it, on this processor.

With AVX2 alone, GELU takes 1030 microseconds in the product of (128, 384) and (1536, 384), and 290 after it.
"""


def _numbers(name: str, *values: object) -> Activation | None:
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return Activation(name, tuple(numbers)) if len(numbers) == len(values) else None


def _gelu(approximate: object) -> Activation | None:
    return Activation("gelu", (), str(approximate)) if approximate in ("none", "tanh") else None


def _clamp(min: object, max: object = None) -> Activation | None:  # torch's names
    if max is None and type(min) in (int, float) and min == 0:
        return RELU
    return None if min is None or max is None else _numbers("hardtanh", min, max)


# By operation, what oneDNN calls it.
_OPERATIONS: Mapping[str, Callable[..., Activation | None]] = {
    "relu": lambda: RELU,
    "relu6": lambda: RELU6,
    "hardswish": lambda: Activation("hardswish"),
    "hardsigmoid": lambda: Activation("hardsigmoid"),
    "silu": lambda: Activation("swish"),
    "sigmoid": lambda: Activation("sigmoid"),
    "tanh": lambda: Activation("tanh"),
    "gelu": _gelu,
    "leaky_relu": lambda negative_slope: _numbers("leaky_relu", negative_slope),
    "hardtanh": lambda min_val, max_val: _numbers("hardtanh", min_val, max_val),
    "clamp": _clamp,
    "clamp_min": _clamp,
}


def activation_of(index: GraphIndex, node: Node, value: Node) -> Activation | None:
    """Return the activation that a node applies to a value, or None for anything else.

    Modules have to be torch's own, without hooks. In-place forms count too: they overwrite the result of the layer.
    """
    call = read_activation(index, node)
    if not isinstance(call, ActivationCall) or call.input is not value or call.name not in _OPERATIONS:
        return None
    return _OPERATIONS[call.name](**call.settings)
