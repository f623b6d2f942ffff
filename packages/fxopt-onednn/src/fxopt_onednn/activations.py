"""What follows a layer element by element: the calls that the operators can take along, on every form of graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from fxopt_core import GraphIndex
from fxopt_onednn.arguments import UNKNOWN, calls_plainly, operation_of, settings_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """A function that is applied element by element, as oneDNN knows it.

    Attributes:
        name: oneDNN's name of it; "none" for none.
        scalars: its numbers.
        algorithm: which of its algorithms; "" where there is one.
    """

    name: str = "none"
    scalars: tuple[float, ...] = ()
    algorithm: str = ""

    def __call__(self, value: Tensor) -> Tensor:
        """Apply it by torch's own function.

        >>> Activation("hardtanh", (0.0, 6.0))(torch.tensor([-1.0, 7.0]))
        tensor([0., 6.])
        """
        return applied((self.name, self.scalars, self.algorithm), value)

    def __str__(self) -> str:
        """Return its name and its numbers."""
        numbers = ", ".join(map(str, (*self.scalars, self.algorithm) if self.algorithm else self.scalars))
        return f"{self.name}({numbers})" if numbers else self.name


NONE, RELU, RELU6 = Activation(), Activation("relu"), Activation("hardtanh", (0.0, 6.0))

Unary = tuple[str, tuple[float, ...], str]
"""An activation as the operators take it: name, numbers, algorithm."""

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


def applied(unary: Unary, value: Tensor) -> Tensor:
    """Return what torch's own function makes of a value."""
    name, numbers, algorithm = unary
    return _APPLIED[name](value, numbers, algorithm)


def _numbers(name: str, *values: object) -> Activation | None:
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return Activation(name, tuple(numbers)) if len(numbers) == len(values) else None


def _gelu(approximate: object) -> Activation | None:
    return Activation("gelu", (), str(approximate)) if approximate in ("none", "tanh") else None


def _clamp(low: object, high: object) -> Activation | None:
    if high is None and type(low) in (int, float) and low == 0:
        return RELU
    return None if low is None or high is None else _numbers("hardtanh", low, high)


def _fixed(activation: Activation) -> tuple[tuple[tuple[str, object], ...], Callable[..., Activation | None]]:
    return (), lambda: activation


# Per operation: its parameters besides the input, with their defaults, and the activation that they make.
_OPERATIONS: Mapping[str, tuple[tuple[tuple[str, object], ...], Callable[..., Activation | None]]] = {
    "relu": _fixed(RELU),
    "relu6": _fixed(RELU6),
    "hardswish": _fixed(Activation("hardswish")),
    "hardsigmoid": _fixed(Activation("hardsigmoid")),
    "silu": _fixed(Activation("swish")),
    "sigmoid": _fixed(Activation("sigmoid")),
    "tanh": _fixed(Activation("tanh")),
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
    """Return the activation that a node applies to a value, or None where it does something else.

    Modules count where they are exactly torch's own, without hooks. In-place forms count like the others: what they
    write is what the layer made.
    """
    if node.op == "call_module":
        module = index.module_of(node)
        read = _MODULES.get(type(module)) if module is not None else None
        return read(module) if read is not None and calls_plainly(module, node, value) else None
    name = operation_of(node)
    if name is None or name.removesuffix("_") not in _OPERATIONS:
        return None
    parameters, make = _OPERATIONS[name.removesuffix("_")]
    settings = settings_of(node, value, (*parameters, ("inplace", False)))
    if settings is None or UNKNOWN in settings.values():
        return None
    return make(*(settings[key] for key, _ in parameters))
