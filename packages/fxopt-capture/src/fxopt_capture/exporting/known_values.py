"""Inputs whose values decide sizes, such as a grid of image patches: one graph is for one set of these values.

During an export, tensors have no values, so that a model cannot read sizes from them. Here, what a model computes from
such inputs alone is computed a second time beside the export, with values, and answers what the model reads. The graph
itself computes everything from its inputs; guards make sure that their values are those that the model has read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxopt_capture._torch import without_modes

#: ``image_grid_thw``, ``target_sizes``, ``spatial_shapes``, ``cu_seqlens``, ``audio_feature_lengths`` of transformers.
_NAMES = re.compile(r"(?:grid_thw|grid_hw|sizes|shapes|lens|lengths)$")
_MANY = 256
_FACTORIES = frozenset({torch.arange, torch.tensor})
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
#: Functions that return values of tensors as numbers of Python.
_READS = frozenset(
    {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero"}
    | {f"__{name}__" for name in ("int", "float", "bool", "index", "contains")}
)
#: Functions whose results have sizes that depend on values.
_SIZED_BY_VALUES = frozenset(
    {"repeat_interleave", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "arange"}
)
_INDEXING = frozenset({"__getitem__", "__setitem__"})
#: Functions whose arguments after the first are sizes, for which torch also takes tensors of one number.
_TAKING_SIZES = frozenset({"view", "reshape", "expand", "repeat", "split", "narrow", "unflatten"})


def named_like_sizes(inputs: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the inputs that are small integer tensors with values and have the names of sizes, grids and lengths."""
    return {
        name: value
        for name, value in inputs.items()
        if _NAMES.search(name) and isinstance(value, Tensor) and _is_integer(value) and value.numel() <= _MANY
    }


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_meta or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


@dataclass(frozen=True)
class _Known:
    """A tensor of an export, with its values and the names of the inputs that these come from.

    `ahead` is how many more writes the tensor has seen than its values. Both see those that are known; after any other
    write, to it or to a view, it is another number, and the values are of the past.
    """

    tensor: Tensor
    values: Tensor
    names: frozenset[str]
    ahead: int


class KnownValues(TorchFunctionMode):
    """While open, answers what is read from these tensors, and from what is computed from them alone.

    Attributes:
        read: the names of the inputs whose values were read.
    """

    def __init__(self, tensors: Mapping[str, Tensor], values: Mapping[str, Tensor], read: set[str]) -> None:
        super().__init__()
        self.read = read
        self._known: dict[int, _Known] = {}  # holds the tensors, so that no other one gets the id of one
        for name, tensor in tensors.items():
            self._note(tensor, values[name], frozenset({name}))

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and compute its result with values too if those of its arguments are known."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _INDEXING:
            args = (args[0], self._numbered(args[1]), *args[2:])
        elif name in _TAKING_SIZES:
            args = (args[0], *pytree.tree_map_only(Tensor, self._number, args[1:]))
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        found = [known for known in map(self._find, tensors) if known is not None]
        is_known = len(found) == len(tensors) and bool(tensors or func in _FACTORIES)
        if not is_known or any(isinstance(leaf, _SYMBOLS) for leaf in leaves):
            return func(*args, **kwargs)
        names = frozenset[str]().union(*(known.names for known in found))
        values = self._values_of(func, args, kwargs)
        if name in _READS and values is not None:
            self.read |= names
            return values
        if values is not None and _depends_on_values(name, tensors):
            self.read |= names
            # A constant of the graph, which each call copies.
            result = pytree.tree_map_only(Tensor, torch.clone, values)
        else:
            result = func(*args, **kwargs)
        made, with_values = pytree.tree_leaves(result), pytree.tree_leaves(values)
        if len(made) == len(with_values):
            for tensor, value in zip(made, with_values, strict=True):
                if isinstance(tensor, Tensor) and isinstance(value, Tensor):
                    self._note(tensor, value, names)
        return result

    def _values_of(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what a function gives for values; None where it is random, or raises."""
        with without_modes():
            state = torch.get_rng_state()
            try:
                args, kwargs = pytree.tree_map_only(Tensor, lambda each: self._known[id(each)].values, (args, kwargs))
                values = func(*args, **kwargs)
            except Exception:  # as the export may do, too
                return None
            if not torch.equal(state, torch.get_rng_state()):
                torch.set_rng_state(state)
                return None
            return values

    def _find(self, tensor: Tensor) -> _Known | None:
        found = self._known.get(id(tensor))
        return found if found is not None and tensor._version - found.values._version == found.ahead else None

    def _note(self, tensor: Tensor, values: Tensor, names: frozenset[str]) -> None:
        self._known[id(tensor)] = _Known(tensor, values, names, tensor._version - values._version)

    def _numbered(self, index: Any) -> Any:
        """Return an index with numbers for the known ones of the tensors that bound its slices."""
        if isinstance(index, tuple):
            return tuple(map(self._numbered, index))
        if isinstance(index, slice):
            return slice(*map(self._number, (index.start, index.stop, index.step)))
        return index

    def _number(self, bound: Any) -> Any:
        known = self._find(bound) if isinstance(bound, Tensor) and bound.dim() == 0 else None
        if known is None:
            return bound
        self.read |= known.names
        with without_modes():
            return int(known.values)


def _depends_on_values(name: str, tensors: list[Tensor]) -> bool:
    """Return whether the sizes of what a function gives depend on values of these tensors."""
    if name == "__getitem__":
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:])
    return name in _SIZED_BY_VALUES or (name == "where" and len(tensors) == 1)
