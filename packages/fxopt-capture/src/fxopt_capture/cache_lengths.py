"""The number of tokens in layers of caches with a sliding window, said by the size of what they hold.

Such a layer counts its tokens in a Python number, ``cumulative_length``, besides the keys and values of those that are
still within the window. For torch's pytrees that number is a constant, so that a graph would be right for one length.
Until the window is full, it is the number of keys, and is written so here: the graph then takes any length below that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch

_COUNT = "cumulative_length"
_KEYS = "keys"
_LENGTH = "keys.shape[-2]"
"""What stands in place of the number."""
Kind = TypeVar("Kind")


def without_lengths(cache: Kind) -> Kind:
    """Return a copy of a cache in which no layer counts what the size of its keys says.

    Args:
        cache: a cache, or a cache of caches; it stays as it is. Keys are of shape (batch, heads, tokens, features).
    """
    copied = _copied(cache)
    for name, value in vars(cache).items():
        if _is_cache_like(value):
            vars(copied)[name] = without_lengths(value)
        elif type(value) is list:
            vars(copied)[name] = [_without_length(layer) for layer in value]
    return copied


def with_lengths(cache: Kind) -> Kind:
    """Return a cache after giving back, in place, the numbers that `without_lengths` has taken from it."""
    for layer in _layers(cache):
        keys = vars(layer).get(_KEYS)
        if vars(layer).get(_COUNT) == _LENGTH and isinstance(keys, torch.Tensor):
            vars(layer)[_COUNT] = keys.shape[-2]
    return cache


def _without_length(layer: Any) -> Any:
    if not _counts_keys(layer):
        return layer
    copied = _copied(layer)
    vars(copied)[_COUNT] = _LENGTH
    return copied


def _counts_keys(layer: Any) -> bool:
    """Whether a layer's number is the size of its keys; while a model is traced, whether it was read off that size.

    A number that the traced model has computed is an output of the graph, even where it is equal: whether torch knows
    that differs between one trace and the next, and both have to say the same.
    """
    attributes = getattr(layer, "__dict__", {})
    count, keys = attributes.get(_COUNT), attributes.get(_KEYS)
    if not isinstance(keys, torch.Tensor) or keys.dim() < 2:
        return False
    size: object = keys.shape[-2]
    if isinstance(count, torch.SymInt) and isinstance(size, torch.SymInt):
        return count.node is size.node
    return type(count) is int and type(size) is int and count == size


def _layers(cache: object) -> Iterator[Any]:
    for value in vars(cache).values():
        if _is_cache_like(value):
            yield from _layers(value)
        elif type(value) is list:
            yield from (layer for layer in value if hasattr(layer, "__dict__"))


def _is_cache_like(value: object) -> bool:
    return isinstance(getattr(value, "layers", None), list)


def _copied(value: Kind) -> Kind:
    """Return an object of the same attributes, whatever its class has to say of copies."""
    copied = object.__new__(type(value))
    vars(copied).update(vars(value))
    return copied
