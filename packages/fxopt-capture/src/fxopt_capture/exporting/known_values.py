"""Inputs whose values decide sizes, such as a grid of image patches: one graph holds one set of these values."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxopt_capture._torch import without_modes

#: ``image_grid_thw``, ``target_sizes``, ``spatial_shapes``, ``cu_seqlens``, ``audio_feature_lengths`` of transformers.
_NAMES = re.compile(r"(?:grid_thw|grid_hw|sizes|shapes|lens|lengths)$")
_MANY = 256
# Of integers alone, and only where their result is integers: a model may write activations into others.
_FACTORIES = frozenset({torch.arange, torch.tensor})
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def that_decide_sizes(inputs: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the inputs that are small integer tensors with the names of sizes, grids and lengths."""
    return {
        name: value
        for name, value in inputs.items()
        if isinstance(value, Tensor) and _NAMES.search(name) and value.numel() <= _MANY and _is_integer(value)
    }


class KnownValues(TorchFunctionMode):
    """While open, computes with values what depends on these tensors and on numbers alone.

    During an export, other tensors have no values. The code of a model may then read sizes from known ones, and what
    reaches a tensor without values is a constant of the graph.
    """

    def __init__(self, tensors: Collection[Tensor]) -> None:
        super().__init__()
        self._known = {id(tensor): tensor for tensor in tensors}  # held, so that no other tensor gets the id of one

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, without the modes of the export if all its tensors are known."""
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        is_known = all(id(tensor) in self._known for tensor in tensors) if tensors else func in _FACTORIES
        if not is_known or any(isinstance(leaf, _SYMBOLS) for leaf in leaves):
            return func(*args, **kwargs)
        with without_modes():
            result = func(*args, **kwargs)
        found = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if not tensors and not all(map(_is_integer, found)):
            return func(*args, **kwargs)
        self._known.update((id(tensor), tensor) for tensor in found)
        return result


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
