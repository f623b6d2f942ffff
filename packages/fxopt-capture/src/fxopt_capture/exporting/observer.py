"""Observing what a traced model does that its graph does not show: dtypes and layouts it reads, caches it fills.

A dtype that the model's Python code reads (``torch.finfo(x.dtype)``, ``torch.ones(2, dtype=x.dtype)``) is a constant in
the graph, and so is what it reads of strides. And an object that the model changes in place, such as a cache of keys
and values, becomes one container of inputs and another of outputs.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxopt_capture.call.caches import is_cache
from fxopt_capture.exporting.failure import line_of_frame
from fxopt_capture.exporting.known_values import KnownValues
from fxopt_rewrite import dtype_kind

#: What a mode is given as the function when code reads one of these attributes.
_GETTERS = tuple(getattr(torch.Tensor, name).__get__ for name in ("dtype", "itemsize", "nbytes"))
_PLAIN = (int, float, str)
_READS = frozenset({*_GETTERS, torch.result_type, torch.Tensor.type, torch.Tensor.element_size})
#: Attributes that hold something else during an export.
_EXCHANGED = frozenset({"_parameters", "_buffers", "_modules", "forward", "_flat_weights", "_flat_weight_refs"})
#: What depends on strides. `contiguous` leaves no call in the graph if it returns the tensor itself. Of values within
#: the model, this is usual after attention, and as right for other strides of the inputs.
_OF_LAYOUT = frozenset({torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.contiguous})
#: The key of `Observer.reads` for a layout.
LAYOUT = "layout"


class Observer:
    """Runs a model's forward and notes what the graph does not show.

    Attributes:
        known: inputs whose values the model may read, by name.
        reads: kind of dtype, or `LAYOUT` -> the first place in the model's source that read such a dtype, or strides.
        returned: name of an input that is a cache -> the key or index of the output that is the very same cache.
        lost: names of inputs that are caches, were changed, and are not among the outputs.
        read: names of inputs whose values the model has read.
        stepped: what calling the model changes in attributes, by the name of the attribute -> from, to.
    """

    def __init__(self) -> None:
        self.reads: dict[str, str] = {}
        self.returned: dict[str, object] = {}
        self.lost: list[str] = []
        self.known: dict[str, torch.Tensor] = {}
        self.read: set[str] = set()
        self.stepped: dict[str, tuple[object, object]] = {}

    def run(
        self,
        forward: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        inputs: Mapping[str, object],
    ) -> object:
        """Return ``forward(*args, **kwargs)``; `inputs` are the arguments that are inputs of the graph, by name."""
        # The leaves are kept until the end, so that no new tensor has the id of a former one.
        caches = {name: (value, pytree.tree_leaves(value)) for name, value in inputs.items() if is_cache(value)}
        tensors: Any = {name: inputs[name] for name in self.known}
        with (
            _Reads(self.reads, pytree.tree_leaves(dict(inputs))),
            KnownValues(tensors, self.known, self.read) if tensors else nullcontext(),
        ):
            output = forward(*args, **kwargs)
        places = {id(value): place for place, value in _entries(output)}
        self.returned = {name: places[id(value)] for name, (value, _) in caches.items() if id(value) in places}
        self.lost = [
            name
            for name, (value, leaves) in caches.items()
            if name not in self.returned and [*map(id, pytree.tree_leaves(value))] != [*map(id, leaves)]
        ]
        return output


def attributes_of(model: nn.Module) -> dict[str, object]:
    """Return the attributes of a model's modules by name, with copies of containers."""
    return {
        f"{prefix}.{name}".lstrip("."): _copied(value)
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _EXCHANGED
    }


def _copied(value: Any, depth: int = 4) -> object:
    value = [*value.items()] if isinstance(value, dict) else value
    is_deeper = depth and isinstance(value, list | tuple | set | deque)
    return [_copied(each, depth - 1) for each in value] if is_deeper else value


def changed_attributes(before: Mapping[str, object], now: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Return the old and the new value of each attribute that is no longer the same, by name."""
    both = {name: (before.get(name), now.get(name)) for name in {**before, **now}}
    return {name: (old, new) for name, (old, new) in both.items() if not _is_same(old, new)}


def _is_same(old: object, new: object) -> bool:
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_is_same, old, new))
    return old is new or (isinstance(new, _PLAIN) and type(new) is type(old) and new == old)


def _entries(output: object) -> list[tuple[object, object]]:
    if isinstance(output, Mapping):
        return list(output.items())
    return list(enumerate(output)) if isinstance(output, list | tuple) else []


class _Reads(TorchFunctionMode):
    """While open, notes which kinds of dtype the code that calls torch reads, and whether strides, and where first."""

    def __init__(self, found: dict[str, str], inputs: Sequence[object]) -> None:
        super().__init__()
        self.found, self.inputs = found, inputs

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and note it if it reads a dtype or strides."""
        result = func(*args, **kwargs) if kwargs else func(*args)
        if func in _READS and not (func is torch.Tensor.type and len(args) > 1):  # a conversion
            self._note(dtype_kind(result if isinstance(result, torch.dtype) else args[0].dtype))
        if func in _OF_LAYOUT and (func is not torch.Tensor.contiguous or any(result is each for each in self.inputs)):
            self._note(LAYOUT)
        return result

    def _note(self, key: str) -> None:
        if key not in self.found:
            # Frames 0 and 1 are this method and `__torch_function__`; 2 is the code that reads.
            self.found[key] = line_of_frame(sys._getframe(2)) or "its source"
