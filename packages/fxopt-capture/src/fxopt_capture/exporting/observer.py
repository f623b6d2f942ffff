"""Observing what a traced model does that its graph does not show: dtypes that it reads, caches that it fills.

A dtype that the model's Python code reads (``torch.finfo(x.dtype)``, ``torch.ones(2, dtype=x.dtype)``) is a constant in
the graph. And an object that the model changes in place, such as a cache of keys and values, becomes one container of
inputs and another of outputs.
"""

from __future__ import annotations

import sys
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


class Observer:
    """Runs a model's forward and notes what the graph does not show.

    Attributes:
        known: inputs whose values the model may read, by name.
        dtype_reads: kind of dtype -> the first place in the model's source that read a dtype of this kind.
        returned: name of an input that is a cache -> the key or index of the output that is the very same cache.
        lost: names of inputs that are caches, were changed, and are not among the outputs.
        read: names of inputs whose values the model has read.
        stepped: numbers, flags and strings that calling the model changes, by the name of the attribute -> from, to.
    """

    def __init__(self) -> None:
        self.dtype_reads: dict[str, str] = {}
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
        with _DtypeReads(self.dtype_reads), KnownValues(tensors, self.known, self.read) if tensors else nullcontext():
            output = forward(*args, **kwargs)
        places = {id(value): place for place, value in _entries(output)}
        self.returned = {name: places[id(value)] for name, (value, _) in caches.items() if id(value) in places}
        self.lost = [
            name
            for name, (value, leaves) in caches.items()
            if name not in self.returned and [*map(id, pytree.tree_leaves(value))] != [*map(id, leaves)]
        ]
        return output


def numbers_of(model: nn.Module) -> dict[str, object]:
    """Return the numbers, flags and strings in attributes of a model's modules, by name."""
    return {
        f"{prefix}.{name}".lstrip("."): value
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN)
    }


def changed_numbers(before: Mapping[str, object], now: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Return the old and the new value of each of these attributes that has another value of its type, by name."""
    both = {name: (value, now[name]) for name, value in before.items() if name in now}
    return {name: (old, new) for name, (old, new) in both.items() if type(new) is type(old) and new != old}


def _entries(output: object) -> list[tuple[object, object]]:
    if isinstance(output, Mapping):
        return list(output.items())
    return list(enumerate(output)) if isinstance(output, list | tuple) else []


class _DtypeReads(TorchFunctionMode):
    """While open, notes which kinds of dtype the code that calls torch reads, and where first."""

    def __init__(self, found: dict[str, str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and note it if it reads a dtype."""
        result = func(*args, **kwargs) if kwargs else func(*args)
        if func in _READS:
            self._note(func, args, result)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], result: object) -> None:
        if func is torch.Tensor.type and len(args) > 1:
            return  # a conversion
        dtype = result if isinstance(result, torch.dtype) else args[0].dtype
        if dtype_kind(dtype) not in self.found:
            # Frames 0 and 1 are this method and `__torch_function__`; 2 is the code that reads the dtype.
            self.found[dtype_kind(dtype)] = line_of_frame(sys._getframe(2)) or "its source"
