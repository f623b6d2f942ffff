"""Modules that keep state in plain attributes: counters, caches, layers that are made at the first call.

Traced graph modules share leaf modules with the model, so that one run would otherwise see what another one left.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_CONTAINERS = (dict, OrderedDict, list, set, deque)


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Bring all attributes of a module and of those below back after the ``with`` block.

    That is, which attributes there are and which values they have, the contents of lists, dictionaries, sets and
    queues, and plain tensors, which are replaced by copies meanwhile. Values further inside are not looked at.

    >>> linear = nn.Linear(2, 2)
    >>> linear.seen = []
    >>> with attributes_kept(linear):
    ...     linear.seen.append(1)
    ...     linear.extra = nn.ReLU()
    >>> linear.seen, hasattr(linear, "extra")
    ([], False)
    """
    copies: dict[int, Tensor] = {}
    kept = [_Kept(each, copies) for each in module.modules() if not isinstance(each, torch.jit.ScriptModule)]
    try:
        yield
    finally:
        for each in kept:
            each.restore()


class _Kept:
    """The attributes of one module; those that are tensors are replaced by copies, one for each tensor."""

    def __init__(self, module: nn.Module, copies: dict[int, Tensor]) -> None:
        self._state = vars(module)
        self._attributes = dict(self._state)
        containers = (value for value in self._attributes.values() if type(value) in _CONTAINERS)
        self._contents: list[tuple[Any, list[Any]]] = [(value, _items(value)) for value in containers]
        for name, value in self._attributes.items():
            if isinstance(value, Tensor):
                if id(value) not in copies:
                    copies[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
                self._state[name] = copies[id(value)]

    def restore(self) -> None:
        for name in self._state.keys() - self._attributes.keys():
            del self._state[name]
        self._state.update(self._attributes)
        for container, items in self._contents:
            if not _same(_items(container), items):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(items)


def _items(container: Any) -> list[Any]:
    return list(container.items() if isinstance(container, dict) else container)


def _same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(_is, now, before))


def _is(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 2:  # an item of a dictionary
        return one[0] is other[0] and one[1] is other[1]
    return one is other
