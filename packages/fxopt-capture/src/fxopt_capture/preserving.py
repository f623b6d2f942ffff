"""Leave a model as it was: attributes of its modules, and the random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import nn

Container: TypeAlias = "dict[Any, Any] | list[Any] | set[Any]"

_CONTAINERS = (dict, list, set)
_SEARCHED = (dict, list, tuple)
_NOTHING: list[Any] = []  # the contents of an empty container
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})  # what holds no other tensors


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
        containers = [value for value in self.saved.values() if isinstance(value, _CONTAINERS)]
        self.contents = [(container, _contents(container) if container else _NOTHING) for container in containers]
        self.tensors = [_TensorState(tensor) for tensor in self._tensors()]

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that no parameter or buffer is made of."""
        for name, value in self.saved.items():
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, _SEARCHED) and value and name not in _REGISTERED:
                items = value.values() if isinstance(value, dict) else value
                yield from (item for item in items if isinstance(item, torch.Tensor))

    def restore(self) -> None:
        if not _identical(self.attributes, self.saved):
            self.attributes.clear()
            self.attributes.update(self.saved)
        for container, saved in self.contents:
            if (container or saved) and not _identical(container, saved):
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


def _contents(container: Container) -> Container:
    return dict(container) if isinstance(container, dict) else list(container)


def _identical(left: Container, right: Container) -> bool:
    """Whether two containers hold the very same objects in the same order."""
    if len(left) != len(right) or not all(map(is_, left, right)):
        return False
    return not (isinstance(left, dict) and isinstance(right, dict)) or all(map(is_, left.values(), right.values()))


def _refill(container: Container, contents: Container) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(contents)
    else:
        container.update(contents)
