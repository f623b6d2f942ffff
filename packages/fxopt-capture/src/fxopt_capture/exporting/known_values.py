"""Inputs whose values decide sizes, such as a grid of image patches: one graph is for one set of these values.

During an export, tensors have no values, so that a model cannot read sizes from them. Here, what a model computes from
such inputs alone is computed a second time beside the export, with values, and answers what the model reads. The graph
itself computes everything from its inputs; guards make sure that their values are those that the model has read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxopt_capture._torch import without_modes

#: ``image_grid_thw``, ``target_sizes``, ``spatial_shapes``, ``cu_seqlens``, ``audio_feature_lengths`` of transformers.
_NAMES = re.compile(r"(?:grid_thw|grid_hw|sizes|shapes|lens|lengths)$")
_MANY = 256
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_FACTORIES = (torch.arange, torch.tensor)
#: Functions whose arguments after the first are sizes or places, for which torch also takes tensors of one number.
_TAKING_SIZES = ("__getitem__", "__setitem__", "view", "reshape", "expand", "repeat", "split", "narrow", "unflatten")
#: Functions that return values as numbers of Python, and those whose results have sizes that depend on values.
_READING = frozenset(
    {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__int__", "__float__", "__bool__", "__index__"}
    | {"__contains__", "repeat_interleave", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"}
    | {"bincount", "arange", "tensor"}
)


def named_like_sizes(inputs: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the inputs that are small integer tensors and have the names of sizes, grids and lengths."""
    tensors = {name: value for name, value in inputs.items() if _NAMES.search(name) and isinstance(value, Tensor)}
    return {name: value for name, value in tensors.items() if value.dtype in _INTEGERS and value.numel() <= _MANY}


class KnownValues(TorchFunctionMode):
    """While open, answers what is read from these tensors, and from what is computed from them alone.

    Attributes:
        read: the names of the inputs whose values were read.
    """

    def __init__(self, tensors: Mapping[str, Tensor], values: Mapping[str, Tensor], read: set[str]) -> None:
        super().__init__()
        self.read = read
        # A tensor, which is held so that no other one gets its id, its values, the inputs that these come from, and how
        # many more writes the tensor has seen than its values. Both see those that are known; after another write, to
        # the tensor or to a view of it, the values are of the past.
        self._known: dict[int, tuple[Tensor, Tensor, frozenset[str], int]] = {}
        with without_modes():  # copies, since the model may write into them
            for name, tensor in tensors.items():
                self._note(tensor, values[name].detach().clone(), frozenset({name}))

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and compute its result with values too if those of its arguments are known."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in _TAKING_SIZES:
            args = (*args[:1], *map(self._numbered, args[1:]))
        leaves = pytree.tree_leaves((args, kwargs))
        # A slice is no container of pytrees, and may hold a size or a tensor that is not known.
        leaves += [part for leaf in leaves if isinstance(leaf, slice) for part in (leaf.start, leaf.stop, leaf.step)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        is_known = all(map(self._is_known, tensors)) if tensors else func in _FACTORIES
        if not is_known or any(isinstance(leaf, _SYMBOLS) for leaf in leaves):
            return func(*args, **kwargs)
        names = frozenset[str]().union(*(self._known[id(tensor)][2] for tensor in tensors))
        values = self._values_of(func, args, kwargs)
        if values is not None and tensors and _reads(name, tensors):
            self.read |= names
            # A constant, which each call of the graph copies.
            result = pytree.tree_map_only(Tensor, torch.clone, values)
        else:
            result = func(*args, **kwargs)
        for tensor, value in zip(pytree.tree_leaves(result), pytree.tree_leaves(values), strict=False):
            if isinstance(tensor, Tensor) and isinstance(value, Tensor):
                self._note(tensor, value, names)
        return result

    def _values_of(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what a function gives for values; None where it is random, or raises."""
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: self._known[id(tensor)][1], (args, kwargs))
        with without_modes():
            state = torch.get_rng_state()
            try:
                values = func(*args, **kwargs)
            except Exception:  # as the export may do, too
                return None
            if torch.equal(state, torch.get_rng_state()):
                return values
            torch.set_rng_state(state)
            return None

    def _is_known(self, tensor: Tensor) -> bool:
        _, values, _, ahead = self._known.get(id(tensor), (tensor, None, None, 0))
        return values is not None and tensor._version - values._version == ahead

    def _note(self, tensor: Tensor, values: Tensor, names: frozenset[str]) -> None:
        if not (tensor.is_inference() or values.is_inference()):  # which do not count writes
            self._known[id(tensor)] = tensor, values, names, tensor._version - values._version

    def _numbered(self, value: Any) -> Any:
        """Return a size, an index or a sequence of these with numbers for known tensors of one number."""
        if isinstance(value, slice):
            return slice(*map(self._numbered, (value.start, value.stop, value.step)))
        if isinstance(value, tuple | list):
            return [*map(self._numbered, value)] if isinstance(value, list) else tuple(map(self._numbered, value))
        if not isinstance(value, Tensor) or value.dim() or not self._is_known(value):
            return value
        self.read |= self._known[id(value)][2]
        with without_modes():
            return self._known[id(value)][1].item()


def _reads(name: str, tensors: list[Tensor]) -> bool:
    """Return whether a function returns values of tensors, or something whose sizes depend on them."""
    if name == "__getitem__":
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:])
    return name in _READING or (name == "where" and len(tensors) == 1)
