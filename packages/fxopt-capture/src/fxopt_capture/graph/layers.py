"""The operator calls that layers of ``torch.nn`` make, as tables of what each argument must be.

Per operator: the classes of layer that may have made the call, and a function from a layer to the arguments that its
``forward`` gives the operator besides the layer's input. A call is the layer's own exactly if all of them agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

aten = torch.ops.aten
Arguments = Mapping[str, object]


@dataclass(frozen=True)
class LayerCall:
    """An operator that a layer's ``forward`` amounts to.

    Attributes:
        classes: the layers, by exact type.
        arguments: from a layer to the operator's other arguments by name, or None where the layer does more than that.
        input: the operator's name for the layer's input.
    """

    classes: tuple[type[nn.Module], ...]
    arguments: Callable[[Any], Arguments | None]
    input: str = "input"


def _named(*names: str) -> Callable[[nn.Module], Arguments]:
    """Return the arguments that are attributes of the layer by the same names."""
    return lambda layer: {name: getattr(layer, name) for name in names}


_CONVOLUTION = _named("weight", "bias", "stride", "padding", "dilation", "groups")


def _convolution(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> Arguments | None:
    return _CONVOLUTION(layer) if layer.padding_mode == "zeros" else None


def _transposed(layer: nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d) -> Arguments | None:
    arguments = _convolution(layer)  # type: ignore[arg-type]  # the same attributes, and one more
    return None if arguments is None else {**arguments, "output_padding": layer.output_padding}


def _batch_norm(layer: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> Arguments | None:
    if layer.training and layer.track_running_stats and layer.momentum is None:
        return None
    statistics = not layer.training or layer.track_running_stats
    return {
        "weight": layer.weight,
        "bias": layer.bias,
        "running_mean": layer.running_mean if statistics else None,
        "running_var": layer.running_var if statistics else None,
        "training": layer.training or (layer.running_mean is None and layer.running_var is None),
        "momentum": 0.0 if layer.momentum is None else layer.momentum,
        "eps": layer.eps,
    }


def _embedding(layer: nn.Embedding) -> Arguments | None:
    if layer.max_norm is not None:
        return None
    return {
        "weight": layer.weight,
        "padding_idx": -1 if layer.padding_idx is None else layer.padding_idx,
        "scale_grad_by_freq": layer.scale_grad_by_freq,
        "sparse": layer.sparse,
    }


def _convolutions() -> dict[object, LayerCall]:
    plain = {(nn.Conv1d,): aten.conv1d, (nn.Conv2d,): aten.conv2d, (nn.Conv3d,): aten.conv3d}
    return {
        overload: LayerCall(classes, _convolution)
        for classes, operator in plain.items()
        for overload in (operator.default, operator.padding)
    }


LAYER_CALLS: Mapping[object, LayerCall] = {
    aten.linear.default: LayerCall((nn.Linear,), _named("weight", "bias")),
    **_convolutions(),
    aten.conv_transpose1d.default: LayerCall((nn.ConvTranspose1d,), _transposed),
    aten.conv_transpose2d.input: LayerCall((nn.ConvTranspose2d,), _transposed),
    aten.conv_transpose3d.input: LayerCall((nn.ConvTranspose3d,), _transposed),
    aten.batch_norm.default: LayerCall((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm),
    aten.layer_norm.default: LayerCall((nn.LayerNorm,), _named("normalized_shape", "weight", "bias", "eps")),
    aten.group_norm.default: LayerCall((nn.GroupNorm,), _named("num_groups", "weight", "bias", "eps")),
    aten.embedding.default: LayerCall((nn.Embedding,), _embedding, input="indices"),
}


def call_arguments(target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator call by the names in its schema, defaults filled in."""
    defaults = {argument.name: argument.default_value for argument in target._schema.arguments}
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


def agrees(found: object, expected: object) -> bool:
    """Whether an argument of a call is what the layer gives: tensors by identity, ``[1]`` as good as ``(1, 1)``."""
    if isinstance(found, torch.Tensor) or isinstance(expected, torch.Tensor):
        return found is expected
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        values = list(found) * len(expected) if len(found) == 1 else list(found)
        return values == list(expected)
    return type(found) is type(expected) and found == expected
