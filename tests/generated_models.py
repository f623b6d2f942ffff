"""Models that property tests draw.

Linear layers, convolutions and batch norms of many settings, called as modules and as functions, in nested containers,
on values of two to five dimensions; shared, tied, frozen, hooked, parametrized, subclassed; with in-place writes,
divisions of all kinds, dead code, several inputs and outputs of several forms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from generated_operations import CONSTANT, FORMS, PLAIN, Generated, Opaque, Scaled, Step, Subclass, halved, shifted
from hypothesis import HealthCheck, reject, settings, strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize

Shape = tuple[int, ...]
CONVOLUTIONS: dict[int, Any] = {
    1: (nn.Conv1d, nn.ConvTranspose1d),
    2: (nn.Conv2d, nn.ConvTranspose2d),
    3: (nn.Conv3d, nn.ConvTranspose3d),
}
NORMS: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}
PLACES = ("", "", "", "block.", "block.inner.", "layers.0.")
CONSTANTS = (2.0, 3.0, -7.0, 0.1, 8.0, 1e-3)
# Of the kinds, "parametrized" does not pickle, for which torch is to blame.
KINDS = (
    *["plain"] * 12, "frozen", "mixed", "hook", "pre-hook", "tied", "tied", "train", "transposed", "graded", "buffer",
    "parametrized", "alias",
)  # fmt: skip


@dataclass
class Draft:
    """A model in the making: its steps so far, the shape of every value, and the layers by full name."""

    draw: Any
    shapes: list[Shape]
    steps: list[Step] = field(default_factory=list)
    layers: dict[str, nn.Module] = field(default_factory=dict)

    def pick(self, choices: Sequence[Any]) -> Any:
        """Draw one of several things."""
        return self.draw(st.sampled_from(choices))

    def add(self, operation: str, places: Sequence[int], shape: Shape, layer: str | None = None) -> None:
        """Add a step whose value has this shape, without the batch."""
        self.steps.append(Step(operation, tuple(places), layer, self.pick(CONSTANTS)))
        self.shapes.append(shape)

    def layer(self, layer: nn.Module) -> str:
        """Add a layer under a new name, with what makes layers hard; return the name."""
        name = f"{self.pick(PLACES)}l{len(self.layers)}"
        self.layers[name] = layer.eval()
        self._complicate(name, layer, self.pick(KINDS))
        return name

    def _complicate(self, name: str, layer: Any, kind: str) -> None:
        parameters = list(layer.parameters())
        if kind in ("frozen", "mixed"):
            for parameter in parameters[: 1 if kind == "mixed" else None]:
                parameter.requires_grad_(False)
        elif kind == "hook":
            layer.register_forward_hook(halved)
        elif kind == "pre-hook":
            layer.register_forward_pre_hook(shifted)
        elif kind == "tied":
            self._tie(layer)
        elif kind == "transposed" and parameters:
            layer.weight = nn.Parameter(layer.weight.detach().transpose(0, -1).contiguous().transpose(0, -1))
        elif kind == "graded":
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
        elif kind == "buffer" and parameters:
            weight = layer.weight.detach()
            del layer.weight
            layer.register_buffer("weight", weight, persistent=self.pick([True, False]))
        elif kind == "parametrized" and parameters:
            parametrize.register_parametrization(layer, "weight", Scaled())
        elif kind == "alias":
            self.layers[f"other_{name.replace('.', '_')}"] = layer
        elif kind == "train" and isinstance(layer, nn.Linear):
            layer.train()

    def _tie(self, layer: Any) -> None:
        for other in self.layers.values():
            if other is layer or type(other) is not type(layer):
                continue
            for key in ("weight", "bias"):
                mine, others = getattr(layer, key), getattr(other, key)
                if isinstance(mine, nn.Parameter) and isinstance(others, nn.Parameter) and mine.shape == others.shape:
                    setattr(layer, key, others)


def norm(draft: Draft, shape: Shape) -> nn.Module:
    """Return a batch norm with statistics and affine parameters that matter."""
    affine, tracks = draft.pick([True] * 4 + [False]), draft.pick([True] * 6 + [False])
    epsilon = draft.pick([1e-5, 1e-5, 0.1])
    layer: Any = NORMS[len(shape)](shape[0], eps=epsilon, affine=affine, track_running_stats=tracks)
    if tracks:
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2.0)
    if affine:
        nn.init.uniform_(layer.weight, 0.5, 1.5)
        nn.init.normal_(layer.bias)
    return layer  # type: ignore[no-any-return]  # of one of the classes above


def add_linear(draft: Draft, place: int) -> None:
    """Add a linear layer, or use one again."""
    shape = draft.shapes[place]
    fitting = [n for n, m in draft.layers.items() if isinstance(m, nn.Linear) and m.in_features == shape[-1]]
    if fitting and draft.pick([True, False, False]):
        name = draft.pick(fitting)
        operation = draft.pick(["layer", "functional", "weight", "product", "opaque"])
        layer: Any = draft.layers[name]
        if operation == "opaque":
            operation, name = "layer", f"opaque{len(draft.layers)}"
            draft.layers[name] = Opaque(layer).eval()
    else:
        cls = draft.pick([nn.Linear] * 9 + [Subclass])
        layer = cls(shape[-1], draft.pick([1, 2, 3, 4, 4]), bias=draft.pick([True, True, False]))
        name = draft.layer(layer)
        operation = draft.pick(["layer"] * 6 + ["keyword", "functional", "functional", "keywords"])
        operation = "layer" if cls is Subclass else operation
    draft.add(operation, (place,), shape if operation == "weight" else (*shape[:-1], layer.out_features), name)


def add_convolution(draft: Draft, place: int) -> None:
    """Add a convolution, or use one again."""
    channels, *sizes = draft.shapes[place]
    dimensions = len(sizes)
    convolution, transposed = CONVOLUTIONS[dimensions]
    fitting = [n for n, m in draft.layers.items() if type(m) is convolution and m.in_channels == channels]
    if fitting and draft.pick([True, False, False, False]):
        name = draft.pick(fitting)
    else:
        name = draft.layer(_convolution(draft, channels, convolution, transposed))
    layer: Any = draft.layers[name]
    functional = type(layer) is convolution and layer.padding_mode == "zeros" and draft.pick([True, False, False])
    operation = f"conv{dimensions}d" if functional else "layer"
    stride = layer.stride[0]
    draft.add(operation, (place,), (layer.out_channels, *((size - 1) // stride + 1 for size in sizes)), name)


def _convolution(draft: Draft, channels: int, convolution: Any, transposed: Any) -> nn.Module:
    """Return a convolution that keeps sizes, or halves them."""
    settings: dict[str, Any] = {"bias": draft.pick([True, False])}
    settings["groups"] = draft.pick([each for each in (1, 1, 2, 4) if channels % each == 0])
    outputs = draft.pick([2, 4]) if settings["groups"] < 4 else 4
    if draft.pick([True, False, False, False]):
        return transposed(channels, outputs, 3, padding=1, **settings)  # type: ignore[no-any-return]  # a class of torch's
    kernel = draft.pick([1, 3, 3])
    settings |= draft.pick([{}, {}, {"stride": 2}, {"dilation": 2}, {"padding": "same"}, {"padding_mode": "reflect"}])
    settings.setdefault("padding", (kernel - 1) // 2 * settings.get("dilation", 1))
    return convolution(channels, outputs, kernel, **settings)  # type: ignore[no-any-return]  # a class of torch's


def add_norm(draft: Draft, place: int) -> None:
    """Add a batch norm, or use one again."""
    shape = draft.shapes[place]
    cls = NORMS[len(shape)]
    fitting = [n for n, m in draft.layers.items() if type(m) is cls and m.num_features == shape[0]]
    again = fitting and draft.pick([True, False, False])
    name = draft.pick(fitting) if again else draft.layer(norm(draft, shape))
    layer: Any = draft.layers[name]
    functional = not parametrize.is_parametrized(layer) and draft.pick([True, False, False])
    draft.add("norm" if functional else "layer", (place,), shape, name)


def add_other(draft: Draft, place: int) -> None:
    """Add what is no layer with weights."""
    shape = draft.shapes[place]
    choice = draft.pick(["constant", "constant", "plain", "module", "two", "two", "shape"])
    if choice == "module":
        module = draft.pick([nn.ReLU(), nn.ReLU(inplace=True), nn.Identity(), nn.Dropout(0.5), nn.Flatten(0, 0)])
        draft.add("layer", (place,), shape, draft.layer(module))
    elif choice == "two":
        other = draft.pick(range(len(draft.shapes)))
        names = ["add", "divide-by"] if draft.shapes[other] == shape else ["sum", "written-by"]
        draft.add(draft.pick(names), (place, other), shape)
    elif choice == "shape" and shape[-1] % 2 == 0 and draft.pick([True, False]):
        draft.add("half", (place,), (*shape[:-1], shape[-1] // 2))
    elif choice == "shape" and len(shape) > 1 and math.prod(shape) <= 64:
        draft.add("flat", (place,), (math.prod(shape),))
    elif choice == "shape" and len(shape) > 1:
        draft.add("pool", (place,), shape[:-1])
    else:
        draft.add(draft.pick(PLAIN if choice == "plain" else CONSTANT), (place,), shape)


def _model(draw: Any, shape: Shape, choices: Sequence[str], last: int) -> Generated:
    """Draw a model of these operations; so many times in ten, an operation reads the value before it."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    draft = Draft(draw, [shape, shape])
    for _ in range(draw(st.integers(2, 9))):
        before = len(draft.shapes) - 1
        place = before if draw(st.integers(1, 10)) <= last else draw(st.integers(0, before))
        choice = draft.pick(choices)
        if choice == "norm":
            add_norm(draft, place)
        elif choice == "convolution" and len(draft.shapes[place]) > 1:
            add_convolution(draft, place)
        elif choice in ("linear", "convolution"):
            add_linear(draft, place)
        else:
            add_other(draft, place)
    return _finished(draft, shape)


def _finished(draft: Draft, shape: Shape) -> Generated:
    """Return the model; what nothing reads is mostly returned, and sometimes what something does read."""
    read = {place for step in draft.steps for place in step.reads}
    places = range(2, len(draft.shapes))
    returned = {place for place in places if place not in read}
    dropped = draft.draw(st.sets(st.sampled_from(sorted(returned)), max_size=1)) if len(returned) > 1 else set()
    returned = returned - dropped | draft.draw(st.sets(st.sampled_from(places), max_size=1))
    form = draft.pick(["tuple", "tuple", *FORMS])
    model = Generated(draft.steps, draft.layers, tuple(sorted(returned)), shape, form)
    model.training = draft.pick([False, False, True])  # its own flag; layers have theirs
    if not takes(model, inputs_for(model, torch.float32)):
        reject()
    return model


def takes(model: Generated, inputs: Sequence[Tensor]) -> bool:
    """Return whether a model runs on inputs: a view may not fit the strides of a value."""
    try:
        model(*(each.clone(memory_format=torch.preserve_format) for each in inputs))
    except RuntimeError:
        return False
    return True


@st.composite
def linear_models(draw: Any) -> Generated:
    """Draw a model of linear layers, batch norms and divisions, mostly on (batch, features) values."""
    shape = draw(st.sampled_from([(4,), (4,), (4,), (3, 4), (4, 4), (2, 3, 4)]))
    return _model(draw, shape, ["linear"] * 5 + ["norm"] * 2 + ["other"] * 3, 4)


@st.composite
def convolution_models(draw: Any) -> Generated:
    """Draw a model of convolutions and batch norms on values of (batch, channels) and one to three dimensions more."""
    shape = draw(st.sampled_from([(4, 5), (4, 5, 5), (4, 5, 5), (2, 4, 6), (2, 4, 4, 4)]))
    return _model(draw, shape, ["convolution"] * 4 + ["norm"] * 4 + ["linear"] + ["other"] * 2, 7)


def inputs_for(model: Generated, dtype: torch.dtype, batch: int = 3, strided: bool = False) -> tuple[Tensor, Tensor]:
    """Return inputs, always the same ones; on demand with strides that are not the usual ones."""
    generator = torch.Generator().manual_seed(batch)
    x, y = (torch.randn(batch, *model.shape, generator=generator).to(dtype) for _ in range(2))
    if strided:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    return x, y


# Rounding decides what these give, or is made large by them.
ROUGH = ("floor", "mode", "compared", "integer")
EXACT = (torch.float32, torch.float64)


def dtypes_for(model: Generated) -> tuple[torch.dtype, ...]:
    """Return the dtypes in which a model's results can be compared: where rounding is made large, only the exactest."""
    rough = any(s.operation in ROUGH or (s.operation in CONSTANT and s.constant == 1e-3) for s in model.steps)
    norms = [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    if rough or any(not each.track_running_stats for each in norms):
        return (torch.float64,)
    exact = any(isinstance(each, nn.modules.conv._ConvNd) for each in model.modules())
    return EXACT if exact else (*EXACT, torch.bfloat16, torch.float16)


def is_picklable(model: nn.Module) -> bool:
    """Return whether torch lets a model be pickled."""
    return not any(map(parametrize.is_parametrized, model.modules()))


def drawn(examples: int) -> settings:
    """Return settings that draw so many models, and many more in the profile "nightly"."""
    factor = settings().max_examples / 100 if settings.get_current_profile_name() == "nightly" else 1
    return settings(max_examples=int(examples * factor), deadline=None, suppress_health_check=list(HealthCheck))
