"""Models that property tests draw: shared and tied layers, hooks, in-place operations, unequal sizes, mixed bias."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

BATCH, SIZE = 3, 4


@dataclass
class Step:
    """One operation: its name, the values it reads, and the layers or constants that it uses."""

    operation: str
    reads: tuple[int, ...]
    layer: str | None = None
    constant: float = 1.0


class Generated(nn.Module):
    """Runs its steps, one after the other; returns the values that nothing reads, and a few more.

    Attributes:
        shape: that of its input.
    """

    def __init__(
        self, steps: list[Step], layers: dict[str, nn.Module], returned: tuple[int, ...], dimensions: int = 0
    ) -> None:
        super().__init__()
        self.shape = (BATCH, SIZE, *[5] * dimensions)
        self.steps = steps
        self.layers = nn.ModuleDict(layers)
        self.returned = returned

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for step in self.steps:
            layer: Any = None if step.layer is None else self.layers[step.layer]
            values.append(OPERATIONS[step.operation](layer, step.constant, *(values[place] for place in step.reads)))
        return tuple(values[place] for place in self.returned)


def _in_place(layer: Any, constant: float, x: Tensor) -> Tensor:
    y = x * 1.0
    y.add_(constant)
    return y


def _written_input(layer: Any, constant: float, x: Tensor) -> Tensor:
    x.mul_(constant)
    return x + 0.0


def _set_item(layer: Any, constant: float, x: Tensor) -> Tensor:
    y = x.clone()
    y.narrow(-1, 0, 1).fill_(constant)
    return y


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "layer": lambda layer, constant, x: layer(x),
    "keyword": lambda layer, constant, x: layer(input=x),
    "functional": lambda layer, constant, x: F.linear(x, layer.weight, layer.bias),
    "weight": lambda layer, constant, x: x + layer.weight.sum(),
    "norm": lambda layer, constant, x: F.batch_norm(
        x, layer.running_mean, layer.running_var, layer.weight, layer.bias, False, 0.1, layer.eps
    ),
    "relu": lambda layer, constant, x: F.relu(x),
    "divide": lambda layer, constant, x: x / constant,
    "method": lambda layer, constant, x: x.div(constant),
    "floor": lambda layer, constant, x: (x / constant).floor(),
    "in-place": _in_place,
    "written": _written_input,
    "set": _set_item,
    "view": lambda layer, constant, x: x.reshape(x.shape[0], -1).view(x.shape),
    "transposed": lambda layer, constant, x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "sum": lambda layer, constant, x, y: x.sum(-1, keepdim=True) + y.sum(-1, keepdim=True) + x,
    "inplace-divide": lambda layer, constant, x: (x + 0.0).div_(constant),
}

UNARY = ("relu", "divide", "method", "floor", "in-place", "written", "set", "view", "transposed", "inplace-divide")


@dataclass
class Draft:
    """A model in the making: its steps so far, the size of every value, and the layers by what they take."""

    sizes: list[int] = field(default_factory=lambda: [SIZE])
    steps: list[Step] = field(default_factory=list)
    layers: dict[str, nn.Module] = field(default_factory=dict)

    def add(self, step: Step, size: int) -> None:
        """Add a step whose value has this many features."""
        self.steps.append(step)
        self.sizes.append(size)


def new_layer(draw: Any, draft: Draft, layer: nn.Module) -> str:
    """Add a layer under a new name, with what makes layers hard: frozen tensors, hooks, ties."""
    name = f"l{len(draft.layers)}"
    sort = draw(st.sampled_from(["plain"] * 6 + ["frozen", "mixed", "hook", "tied", "train", "transposed", "graded"]))
    if sort in ("frozen", "mixed"):
        for parameter in list(layer.parameters())[: 1 if sort == "mixed" else None]:
            parameter.requires_grad_(False)
    elif sort == "hook":
        layer.register_forward_hook(halved)
    elif sort == "tied":
        same = [m for m in draft.layers.values() if type(m) is type(layer) and m.weight.shape == layer.weight.shape]
        if same:
            layer.weight = same[0].weight
    elif sort == "transposed":
        weight: Tensor = layer.get_parameter("weight").detach()
        layer.weight = nn.Parameter(weight.transpose(0, -1).contiguous().transpose(0, -1))
    elif sort == "graded":
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
    elif sort == "train" and isinstance(layer, nn.Linear):
        draft.layers[name] = layer.train()
        return name
    draft.layers[name] = layer.eval()
    return name


def halved(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Halve an output: a hook that pickles."""
    return output * 0.5


def norm(features: int, cls: Any) -> nn.Module:
    """Return a batch norm with statistics and affine parameters that matter."""
    layer = cls(features)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2.0)
    nn.init.uniform_(layer.weight, 0.5, 1.5)
    nn.init.normal_(layer.bias)
    return layer  # type: ignore[no-any-return]  # of the class that was given


@st.composite
def linear_models(draw: Any) -> Generated:
    """Draw a model of linear layers, batch norms and divisions on (batch, features) values."""
    draft = Draft()
    torch.manual_seed(draw(st.integers(0, 1000)))
    for _ in range(draw(st.integers(2, 9))):
        place = draw(st.integers(0, len(draft.sizes) - 1))
        size = draft.sizes[place]
        choice = draw(st.sampled_from(["linear"] * 5 + ["again", "norm", "norm", "sum", "unary", "unary"]))
        linears = [n for n, m in draft.layers.items() if isinstance(m, nn.Linear) and m.in_features == size]
        norms = [n for n, m in draft.layers.items() if isinstance(m, nn.BatchNorm1d) and m.num_features == size]
        if choice == "linear" or (choice == "again" and not linears):
            layer = nn.Linear(size, draw(st.integers(1, 4)), bias=draw(st.booleans()))
            name = new_layer(draw, draft, layer)
            operation = draw(st.sampled_from(["layer", "layer", "layer", "keyword", "functional"]))
            draft.add(Step(operation, (place,), name), layer.out_features)
        elif choice == "again":
            name = draw(st.sampled_from(linears))
            again: Any = draft.layers[name]
            operation = draw(st.sampled_from(["layer", "functional", "weight"]))
            draft.add(Step(operation, (place,), name), size if operation == "weight" else again.out_features)
        elif choice == "norm":
            shared = norms and draw(st.booleans())
            name = draw(st.sampled_from(norms)) if shared else new_layer(draw, draft, norm(size, nn.BatchNorm1d))
            draft.add(Step(draw(st.sampled_from(["layer", "norm"])), (place,), name), size)
        elif choice == "sum":
            draft.add(Step("sum", (place, draw(st.integers(0, len(draft.sizes) - 1)))), size)
        else:
            constant = draw(st.sampled_from([2.0, 3.0, -7.0, 0.1, 8.0]))
            draft.add(Step(draw(st.sampled_from(UNARY)), (place,), None, constant), size)
    return finished(draw, draft)


CONVOLUTIONS: dict[int, Any] = {
    1: (nn.Conv1d, nn.ConvTranspose1d),
    2: (nn.Conv2d, nn.ConvTranspose2d),
    3: (nn.Conv3d, nn.ConvTranspose3d),
}
NORMS: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


@st.composite
def convolution_models(draw: Any) -> Generated:
    """Draw a model of convolutions and batch norms on values of (batch, channels) and one to three dimensions more."""
    dimensions = draw(st.sampled_from([1, 2, 2, 2, 3]))
    convolution, transposed = CONVOLUTIONS[dimensions]
    draft = Draft()
    torch.manual_seed(draw(st.integers(0, 1000)))
    for _ in range(draw(st.integers(2, 8))):
        place = draw(st.sampled_from([len(draft.sizes) - 1, draw(st.integers(0, len(draft.sizes) - 1))]))
        size = draft.sizes[place]
        choice = draw(st.sampled_from(["convolution"] * 4 + ["norm"] * 4 + ["again", "unary"]))
        same = [n for n, m in draft.layers.items() if isinstance(m, convolution) and m.in_channels == size]
        if choice == "convolution":
            channels, bias = draw(st.sampled_from([2, 4])), draw(st.booleans())
            groups = draw(st.sampled_from([1, 2])) if size % 2 == 0 else 1
            layer: nn.Module = convolution(size, channels, 3, padding=1, groups=groups, bias=bias)
            if draw(st.integers(0, 4)) == 0:
                layer = transposed(size, channels, 3, padding=1, groups=groups, bias=bias)
            draft.add(Step("layer", (place,), new_layer(draw, draft, layer)), channels)
        elif choice == "norm":
            name = new_layer(draw, draft, norm(size, NORMS[dimensions]))
            draft.add(Step(draw(st.sampled_from(["layer", "norm"])), (place,), name), size)
        elif choice == "again" and same:
            name = draw(st.sampled_from(same))
            again: Any = draft.layers[name]
            draft.add(Step("layer", (place,), name), again.out_channels)
        else:
            operation = draw(st.sampled_from(["relu", "in-place", "written", "divide", "set"]))
            draft.add(Step(operation, (place,), None, 2.0), size)
    return finished(draw, draft, dimensions)


def finished(draw: Any, draft: Draft, dimensions: int = 0) -> Generated:
    """Return the model; what nothing reads is returned, and sometimes what something does read."""
    read = {place for step in draft.steps for place in step.reads}
    returned = {place for place in range(1, len(draft.sizes)) if place not in read}
    returned |= draw(st.sets(st.integers(1, len(draft.sizes) - 1), max_size=1))
    return Generated(draft.steps, draft.layers, tuple(sorted(returned)), dimensions)
