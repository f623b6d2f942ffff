"""What a trial tries beside the example, and how much of a model the example reaches."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxopt_core import kept

Inputs = Mapping[str, Any]
MODALITIES = {
    "text": r"(.*_)?input_ids|(.*_)?inputs_embeds|input_tokens",
    "images": r".*pixel_values.*|images?|input_image|x",
    "sounds": r"(.*_)?input_features|(.*_)?input_values|audio.*|waveform|speech",
}
VARIED = {
    "lengths": "other lengths",
    "batches": "other batches",
    "images": "larger images",
    "sounds": "longer sounds",
    "masks": "masks of ones",
}
"""What is varied, with the headings of the page."""
_MORE = 32
"""Rows and columns of an image, or frames of features, that are added."""


def modalities(names: Iterable[str]) -> list[str]:
    """Return the kinds of data that these inputs are.

    >>> modalities(["input_ids", "attention_mask", "pixel_values"])
    ['text', 'images']
    """
    listed = list(names)
    return [kind for kind, pattern in MODALITIES.items() if any(re.fullmatch(pattern, name) for name in listed)]


def left_out(model: nn.Module, example: Inputs) -> list[str]:
    """Return which of images and sounds a model's ``forward`` takes, and the example does not have."""
    given = modalities(example)
    taken = modalities(inspect.signature(model.forward).parameters)
    return [kind for kind in taken if kind not in given and kind != "text"]


def variations(example: Inputs, others: Sequence[Inputs]) -> list[tuple[str, Inputs]]:
    """Return other inputs with what is varied in them: those given, larger images, longer sounds, masks of ones."""
    found = [(_difference(example, other), other) for other in others]
    changes: dict[str, Callable[[str, Tensor], Tensor]] = {"images": _larger, "sounds": _longer, "masks": _unmasked}
    for kind, change in changes.items():
        changed = {name: change(name, value) if isinstance(value, Tensor) else value for name, value in example.items()}
        if any(value is not example[name] for name, value in changed.items()):
            found.append((kind, changed))
    return found


def _difference(example: Inputs, other: Inputs) -> str:
    shapes = [[tuple(leaf.shape[1:]) for leaf in pytree.tree_leaves(dict(each)) if isinstance(leaf, Tensor)]
              for each in (example, other)]  # fmt: skip
    return "batches" if shapes[0] == shapes[1] else "lengths"


def _larger(name: str, value: Tensor) -> Tensor:
    is_image = value.dim() >= 4 and value.is_floating_point() and "images" in modalities([name])
    if not (is_image or name == "pixel_mask") or min(value.shape[-2:]) < _MORE:
        return value
    taller = torch.cat([value, value[..., :_MORE, :]], -2)
    return torch.cat([taller, taller[..., :_MORE]], -1)


def _longer(name: str, value: Tensor) -> Tensor:
    if "sounds" not in modalities([name]) or not value.is_floating_point() or max(value.shape[1:]) < 2 * _MORE:
        return value
    time = 1 + value.shape[1:].index(max(value.shape[1:]))
    more = value.shape[time] // 3 if value.shape[time] > 1000 else _MORE
    return torch.cat([value, value.narrow(time, 0, more)], time)


def _unmasked(name: str, value: Tensor) -> Tensor:
    return torch.ones_like(value) if name.endswith("attention_mask") and not value.all() else value


def share_of_weights(model: nn.Module, example: Inputs) -> float | None:
    """Return the share of a model's weights in tensors that change the outputs, by gradients.

    None: the outputs have no gradients, such as indices, or the model was built for training.
    """
    named = dict(model.named_parameters())
    wanted = [parameter for parameter in named.values() if parameter.requires_grad]
    if model.training or not wanted:
        return None
    try:
        with kept(model), torch.enable_grad():
            output = model(**copy.deepcopy(dict(example)))
            leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
            total = sum((torch.randn_like(leaf) * leaf).sum().abs() for leaf in leaves)
            gradients: Sequence[Tensor | None] = torch.autograd.grad(total, wanted, allow_unused=True)  # type: ignore[arg-type]
    except Exception:  # whatever the model or autograd raises
        return None
    reached = [
        each for each, gradient in zip(wanted, gradients, strict=True) if gradient is not None and gradient.any()
    ]
    return round(sum(each.numel() for each in reached) / sum(each.numel() for each in wanted), 3)
