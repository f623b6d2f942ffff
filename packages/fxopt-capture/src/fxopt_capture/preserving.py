"""Leave a model as it was: attributes of its modules, and the random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Give every module of `model` its attributes back at the end, and torch its CPU random state.

    A forward that is traced may leave fake tensors and counters in attributes of the model. Attributes that were
    rebound, added or removed are restored, the contents of lists, dictionaries and sets held by them, and the values of
    tensors in either that are neither parameters nor buffers.
    """
    snapshots = [_ModuleState(module) for module in model.modules()]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for snapshot in snapshots:
            snapshot.restore()


class _ModuleState:
    """The attributes of one module, the contents of the plain containers among them, and the tensors in both."""

    def __init__(self, module: nn.Module) -> None:
        self.attributes = vars(module)
        self.saved = dict(self.attributes)
        self.contents = [
            (value, _contents(value)) for value in self.saved.values() if isinstance(value, dict | list | set)
        ]
        self.tensors = [_TensorState(tensor) for tensor in self._tensors()]

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that no parameter or buffer is made of."""
        for name, value in self.saved.items():
            items = list(value.values()) if isinstance(value, dict) else value
            if name not in ("_parameters", "_buffers"):
                inner = items if isinstance(items, list | tuple) else [items]
                yield from (item for item in inner if isinstance(item, torch.Tensor))

    def restore(self) -> None:
        if not _identical(list(self.attributes.items()), list(self.saved.items())):
            self.attributes.clear()
            self.attributes.update(self.saved)
        for container, saved in self.contents:
            if not _identical(_contents(container), saved):
                _refill(container, saved)
        for tensor in self.tensors:
            tensor.restore()


class _TensorState:
    """The values of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, _version(tensor)
        self.values = tensor.detach().clone()

    def restore(self) -> None:
        if self.version is None or self.tensor._version != self.version:
            with torch.inference_mode(self.tensor.is_inference()), torch.no_grad():
                self.tensor.copy_(self.values)


def _version(tensor: torch.Tensor) -> int | None:
    """Return how often a tensor was written to; None for one made in inference mode, which does not count."""
    return None if tensor.is_inference() else tensor._version


def _contents(container: dict[Any, Any] | list[Any] | set[Any]) -> list[Any]:
    return list(container.items()) if isinstance(container, dict) else list(container)


def _identical(left: list[Any], right: list[Any]) -> bool:
    if len(left) != len(right):
        return False
    return all(a is b or _identical_pair(a, b) for a, b in zip(left, right, strict=True))


def _identical_pair(left: object, right: object) -> bool:
    """Whether two items of a dictionary have the very same key and value."""
    if not (isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right) == 2):
        return False
    return bool(left[0] == right[0]) and left[1] is right[1]


def _refill(container: dict[Any, Any] | list[Any] | set[Any], contents: list[Any]) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(contents)
    else:
        container.update(contents)
