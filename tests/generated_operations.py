"""What drawn models are made of: operations on values, layers of unusual kinds, and the model that runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Tracer


@dataclass
class Step:
    """One operation: its name, the values it reads, and the layers or constants that it uses."""

    operation: str
    reads: tuple[int, ...]
    layer: str | None = None
    constant: float = 1.0


class Generated(nn.Module):
    """Runs its steps, one after the other; returns some of the values, in one of several forms.

    Args:
        steps: what is done.
        layers: what it is done with, by full name.
        returned: the places of the values that are returned.
        shape: that of its inputs, without the batch.
        form: in what they are returned.
    """

    def __init__(
        self,
        steps: list[Step],
        layers: dict[str, nn.Module],
        returned: tuple[int, ...],
        shape: tuple[int, ...],
        form: str = "tuple",
    ) -> None:
        super().__init__()
        self.shape, self.steps, self.returned, self.form = shape, steps, returned, form
        for name, layer in layers.items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.add_module(last, layer)

    def extra_repr(self) -> str:
        """Return the steps, one on each line, so that a failing model can be read."""
        lines = [f"{place}: {step}" for place, step in enumerate(self.steps, 2)]
        return "\n".join([*lines, f"returns {self.returned} as {self.form}, of inputs {self.shape}"])

    def forward(self, x: Tensor, y: Tensor) -> Any:
        values = [x, y]
        for step in self.steps:
            layer: Any = None if step.layer is None else self.get_submodule(step.layer)
            values.append(OPERATIONS[step.operation](layer, step.constant, *(values[place] for place in step.reads)))
        return FORMS[self.form]([values[place] for place in self.returned])


FORMS: dict[str, Callable[[list[Tensor]], Any]] = {
    "tuple": tuple,
    "list": list,
    "dict": lambda values: {f"v{number}": value for number, value in enumerate(values)},
    "nested": lambda values: ({"first": values[0]}, [None, *values[1:]], "text"),
}


class Subclass(nn.Linear):
    """Not exactly a linear layer: it doubles."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2.0


class Opaque(nn.Module):
    """A module that is not traced into, and calls a layer that others call, too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner: Any = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x) + self.inner.weight.sum()
        return result


class OpaqueTracer(Tracer):
    """Traces as torch does, but not into opaque modules."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Opaque) or super().is_leaf_module(m, module_qualified_name)


class Scaled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


def halved(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Halve an output: a hook that pickles."""
    return output * 0.5


def shifted(module: nn.Module, args: Any) -> Any:
    """Shift an input: a hook that pickles."""
    return (args[0] + 0.5, *args[1:]) if args else None


def _in_place(layer: Any, constant: float, x: Tensor) -> Tensor:
    y = x * 1.0
    y.add_(constant)
    return y


def _written_input(layer: Any, constant: float, x: Tensor) -> Tensor:
    x.mul_(constant)
    return x + 0.0


def _written_view(layer: Any, constant: float, x: Tensor) -> Tensor:
    x.narrow(-1, 0, 1).add_(constant)
    return x + 0.0


def _set_item(layer: Any, constant: float, x: Tensor) -> Tensor:
    y = x.clone()
    y.narrow(-1, 0, 1).fill_(constant)
    return y


def _inplace_division(layer: Any, constant: float, x: Tensor) -> Tensor:
    y = x + 0.0
    y /= constant
    return y


def _norm(layer: Any, constant: float, x: Tensor) -> Tensor:
    batch = not layer.track_running_stats
    return F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, batch, 0.1, layer.eps)


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    # with a layer
    "layer": lambda layer, constant, x: layer(x),
    "keyword": lambda layer, constant, x: layer(input=x),
    "functional": lambda layer, constant, x: F.linear(x, layer.weight, layer.bias),
    "keywords": lambda layer, constant, x: F.linear(bias=layer.bias, weight=layer.weight, input=x),
    "product": lambda layer, constant, x: x @ layer.weight.t(),
    "weight": lambda layer, constant, x: x + layer.weight.sum(),
    "norm": _norm,
    "conv1d": lambda layer, constant, x: _conv(F.conv1d, layer, x),
    "conv2d": lambda layer, constant, x: _conv(F.conv2d, layer, x),
    "conv3d": lambda layer, constant, x: _conv(torch.conv3d, layer, x),
    # with a constant
    "divide": lambda layer, constant, x: x / constant,
    "method": lambda layer, constant, x: x.div(constant),
    "function": lambda layer, constant, x: torch.true_divide(x, constant),
    "inplace-divide": _inplace_division,
    "inplace-method": lambda layer, constant, x: (x + 0.0).div_(constant),
    "whole": lambda layer, constant, x: x / int(constant * 10),
    "inverse": lambda layer, constant, x: constant / (x.abs() + 1.0),
    "floor": lambda layer, constant, x: (x / constant).floor(),
    "mode": lambda layer, constant, x: torch.div(x, constant, rounding_mode="floor"),
    "compared": lambda layer, constant, x: torch.where(x / constant > 0.3, x, -x),
    "integer": lambda layer, constant, x: x + (x / constant).to(torch.int64),
    "size": lambda layer, constant, x: x * (x.shape[-1] / constant),
    "in-place": _in_place,
    "written": _written_input,
    "written-view": _written_view,
    "set": _set_item,
    # others that keep the shape
    "relu": lambda layer, constant, x: F.relu(x),
    "inplace-relu": lambda layer, constant, x: F.relu(x, inplace=True) + 0.0,
    "view": lambda layer, constant, x: x.reshape(x.shape[0], -1).view(x.shape),
    "rows": lambda layer, constant, x: x.view(-1).mul(1.5).view(x.shape),
    "transposed": lambda layer, constant, x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "detached": lambda layer, constant, x: x.detach() + x,
    "cast": lambda layer, constant, x: x.to(torch.float64).to(x.dtype),
    "dropout": lambda layer, constant, x: F.dropout(x, 0.5, training=False),
    # of two values
    "sum": lambda layer, constant, x, y: x + y.mean(),
    "add": lambda layer, constant, x, y: x + y,
    "written-by": lambda layer, constant, x, y: x.add_(y.mean()) * 1.0,
    "divide-by": lambda layer, constant, x, y: x / (y.abs() + 1.0),
    # others
    "half": lambda layer, constant, x: x.narrow(-1, 1, x.shape[-1] // 2),
    "flat": lambda layer, constant, x: x.flatten(1),
    "pool": lambda layer, constant, x: x.mean(-1),
}
CONSTANT = (
    "divide", "method", "function", "inplace-divide", "inplace-method", "whole", "inverse", "floor", "mode", "compared",
    "integer", "size", "in-place", "written", "written-view", "set",
)  # fmt: skip
PLAIN = ("relu", "inplace-relu", "view", "rows", "transposed", "detached", "cast", "dropout")


def _conv(function: Callable[..., Tensor], layer: Any, x: Tensor) -> Tensor:
    return function(x, layer.weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)
