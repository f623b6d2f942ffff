"""Random models, made from a seed: shared layers, hooks, in-place operations, mixed flags."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt_testing.cases import ModelCase
from fxopt_testing.models import ALL
from fxopt_testing.models.norm import randomised


def _added_in_place(x: Tensor) -> Tensor:
    y = x * 1.0
    y.add_(0.5)
    return y


def _written(x: Tensor) -> Tensor:
    x.mul_(0.5)
    return x + 0.0


def _set(x: Tensor) -> Tensor:
    y = x.clone()
    y.narrow(1, 0, 1).fill_(0.25)
    return y


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "tanh": torch.tanh,
    "divide": lambda x: x / 3.0,
    "divide by method": lambda x: x.div(0.7),
    "floor": lambda x: (x / 3.0).floor(),
    "multiply": lambda x: x * 1.5,
    "add in place": _added_in_place,
    "write": _written,
    "set": _set,
    "transpose": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "divide in place": lambda x: (x + 0.0).div_(5.0),
    "scale by size": lambda x: x * x.size(0),
}


class Generated(nn.Module):
    """Runs steps, each of which names an operation, the values that it reads, and a layer.

    Args:
        seed: what is drawn.
        steps: how many operations there are.
        convolutions: whether values are (batch, channels, height, width), and layers convolutions.
    """

    def __init__(self, seed: int, steps: int = 7, *, convolutions: bool = False) -> None:
        super().__init__()
        self._draw = random.Random(seed)
        self.layers = nn.ModuleDict()
        self.steps: list[tuple[str, int, str]] = []
        self._sizes = [4]  # of values
        self._sides: dict[str, tuple[int, int]] = {}  # of layers: what they take, and what they give
        for _ in range(steps):
            self._add(convolutions)
        read = {place for _, place, _ in self.steps}
        more = self._draw.randrange(1, len(self._sizes))
        self.returned = sorted({place for place in range(1, len(self._sizes)) if place not in read} | {more})
        del self._draw
        randomised(self)

    def forward(self, x: Tensor) -> Any:
        """(batch, 4, ...) -> the values that nothing reads, and one more."""
        values = [x]
        for operation, place, name in self.steps:
            layer: Any = self.layers[name] if name else None
            value = values[place]
            if operation == "keyword":
                values.append(layer(input=value))
            elif operation == "functional":
                values.append(F.linear(value, layer.weight, layer.bias))
            else:
                values.append(UNARY[operation](value) if layer is None else layer(value))
        return tuple(values[place] for place in self.returned)

    def _add(self, convolutions: bool) -> None:
        draw = self._draw
        place = draw.choice([len(self._sizes) - 1, draw.randrange(len(self._sizes))])
        size = self._sizes[place]
        kind = draw.choice(["layer"] * 5 + ["norm"] * 3 + ["again"] * 2 + ["unary"] * 4)
        if kind == "unary":
            self._note(draw.choice(list(UNARY)), place, "", size)
            return
        same = [name for name in self.layers if self._sides[name][0] == size] if kind == "again" else []
        name = draw.choice(same) if same else self._new_layer(kind, size, convolutions)
        layer = self.layers[name]
        by = draw.choice(["layer", "keyword", "functional"]) if type(layer) is nn.Linear else "layer"
        self._note(by, place, name, self._sides[name][1])

    def _note(self, operation: str, place: int, name: str, size: int) -> None:
        self.steps.append((operation, place, name))
        self._sizes.append(size)

    def _new_layer(self, kind: str, size: int, convolutions: bool) -> str:
        draw = self._draw
        if kind == "norm":
            gives = size
            layer: nn.Module = nn.BatchNorm2d(size) if convolutions else nn.BatchNorm1d(size)
        elif convolutions:
            groups = draw.choice([1, 2])
            made = draw.choice([nn.Conv2d, nn.Conv2d, nn.ConvTranspose2d])
            gives = draw.choice([2, 4])
            layer = made(size, gives, 3, padding=1, groups=groups, bias=draw.random() < 0.5)
        else:
            gives = draw.choice([2, 4, 6])
            layer = nn.Linear(size, gives, bias=draw.random() < 0.7)
        layer.requires_grad_(draw.random() < 0.8)
        if draw.random() < 0.08:
            layer.register_forward_hook(_negated)
        name = f"layer{len(self.layers)}"
        self.layers[name], self._sides[name] = layer, (size, gives)
        return name


def _negated(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return -output


def generated_cases(count: int) -> Iterator[ModelCase]:
    """Yield models of so many seeds, with layers and with convolutions, in forms by turns."""
    for seed in range(count):
        form = ALL[seed % 3]
        yield ModelCase(f"generated {seed}", partial(Generated, seed), torch.randn(3, 4), form=form)
        images = partial(Generated, seed, convolutions=True)
        yield ModelCase(f"generated convolutions {seed}", images, torch.randn(2, 4, 4, 4), form=form)
