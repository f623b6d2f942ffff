"""Element-wise operations that oneDNN computes with the layer before them, as every form of graph calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from fxopt_onednn.operators import UNKNOWN, calls_plainly, operation_of, settings_of
from fxopt_rewrite.index import GraphIndex


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
        return _APPLIED[self.name](value, self.scalars, self.algorithm)

    def __str__(self) -> str:
        """Return its name and its constants."""
        numbers = ", ".join(map(str, (*self.scalars, self.algorithm) if self.algorithm else self.scalars))
        return f"{self.name}({numbers})" if numbers else self.name


NONE, RELU, RELU6 = Activation(), Activation("relu"), Activation("hardtanh", (0.0, 6.0))

_APPLIED: Mapping[str, Callable[[Tensor, tuple[float, ...], str], Tensor]] = {
    "none": lambda value, numbers, algorithm: value,
    "relu": lambda value, numbers, algorithm: F.relu(value),
    "hardtanh": lambda value, numbers, algorithm: F.hardtanh(value, numbers[0], numbers[1]),
    "hardswish": lambda value, numbers, algorithm: F.hardswish(value),
    "hardsigmoid": lambda value, numbers, algorithm: F.hardsigmoid(value),
    "swish": lambda value, numbers, algorithm: F.silu(value),
    "sigmoid": lambda value, numbers, algorithm: torch.sigmoid(value),
    "tanh": lambda value, numbers, algorithm: torch.tanh(value),
    "gelu": lambda value, numbers, algorithm: F.gelu(value, approximate=algorithm),
    "leaky_relu": lambda value, numbers, algorithm: F.leaky_relu(value, numbers[0]),
}


def _numbers(name: str, *values: object) -> Activation | None:
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return Activation(name, tuple(numbers)) if len(numbers) == len(values) else None


def _gelu(approximate: object) -> Activation | None:
    return Activation("gelu", (), str(approximate)) if approximate in ("none", "tanh") else None


def _clamp(low: object, high: object) -> Activation | None:
    if high is None and type(low) in (int, float) and low == 0:
        return RELU
    return None if low is None or high is None else _numbers("hardtanh", low, high)


# By operation: its parameters after the input, with their defaults, and the activation that they describe.
_OPERATIONS: Mapping[str, tuple[tuple[tuple[str, object], ...], Callable[..., Activation | None]]] = {
    "relu": ((), lambda: RELU),
    "relu6": ((), lambda: RELU6),
    "hardswish": ((), lambda: Activation("hardswish")),
    "hardsigmoid": ((), lambda: Activation("hardsigmoid")),
    "silu": ((), lambda: Activation("swish")),
    "sigmoid": ((), lambda: Activation("sigmoid")),
    "tanh": ((), lambda: Activation("tanh")),
    "gelu": ((("approximate", "none"),), _gelu),
    "leaky_relu": ((("negative_slope", 0.01),), lambda slope: _numbers("leaky_relu", slope)),
    "hardtanh": ((("min_val", -1.0), ("max_val", 1.0)), lambda low, high: _numbers("hardtanh", low, high)),
    "clamp": ((("min", None), ("max", None)), _clamp),
    "clamp_min": ((("min", None),), lambda low: _clamp(low, None)),
}
_MODULES: Mapping[type[nn.Module], Callable[[Any], Activation | None]] = {
    nn.ReLU: lambda module: RELU,
    nn.ReLU6: lambda module: RELU6,
    nn.Hardswish: lambda module: Activation("hardswish"),
    nn.Hardsigmoid: lambda module: Activation("hardsigmoid"),
    nn.SiLU: lambda module: Activation("swish"),
    nn.Sigmoid: lambda module: Activation("sigmoid"),
    nn.Tanh: lambda module: Activation("tanh"),
    nn.GELU: lambda module: _gelu(module.approximate),
    nn.LeakyReLU: lambda module: _numbers("leaky_relu", module.negative_slope),
    nn.Hardtanh: lambda module: _numbers("hardtanh", module.min_val, module.max_val),
}


def read_activation(index: GraphIndex, node: Node, value: Node) -> Activation | None:
    """Return the activation that a node applies to a value, or None for anything else.

    Modules have to be torch's own, without hooks. In-place forms count too: they overwrite the result of the layer.
    """
    if node.op == "call_module":
        module = index.module_of(node)
        read = _MODULES.get(type(module)) if module is not None else None
        return read(module) if read is not None and calls_plainly(module, node, value) else None
    name = (operation_of(node) or "").removesuffix("_")
    if name not in _OPERATIONS:
        return None
    parameters, make = _OPERATIONS[name]
    settings = settings_of(node, value, (*parameters, ("inplace", False)))
    if settings is None or UNKNOWN in settings.values():
        return None
    return make(*(settings[key] for key, _ in parameters))
