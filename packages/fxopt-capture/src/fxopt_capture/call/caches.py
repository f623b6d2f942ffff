"""Caches of keys and values, which models of the transformers library take, change in place and return.

A layer with a sliding window counts its tokens in a Python number, ``cumulative_length``, besides holding the keys and
values within the window. For torch's pytrees this number is a constant, so a graph would only be right for one length.
Until the window is full, the number equals that of the keys, and is recorded in this form here: the graph then takes
any length below the window.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

CACHES_MODULE = "transformers.cache_utils"


def is_cache(value: object) -> bool:
    """Return whether `value` is a cache of the transformers library, without importing it.

    >>> is_cache([torch.ones(1)])
    False
    """
    return is_cache_type(type(value))


def is_cache_type(kind: object) -> bool:
    """Return whether `kind` is a class of caches."""
    loaded = sys.modules.get(CACHES_MODULE)
    return loaded is not None and isinstance(kind, type) and issubclass(kind, loaded.Cache)


def register_cache_types() -> None:
    """Register all loaded classes of caches; transformers would register any others in its own way."""
    waiting = [sys.modules[CACHES_MODULE].Cache] if CACHES_MODULE in sys.modules else []
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        register_cache_type(kind)


def register_cache_type(kind: type) -> None:
    """Register a class of caches with torch's pytrees, as transformers' exporters do, for the life of the process.

    In addition, layers with a sliding window give the number of their tokens as the size of their keys, so that a graph
    can take another number. And `torch.compile` is told to treat the class of a returned cache as a constant, since it
    cannot trace how transformers looks it up.
    """
    exporter = importlib.import_module("transformers.exporters.exporter_dynamo")
    if kind not in pytree.SUPPORTED_NODES:
        exporter.register_pytree_node(_AnyObject)
        plain = pytree.SUPPORTED_NODES[_AnyObject]
        keyed = plain.flatten_with_keys_fn
        pytree.register_pytree_node(
            kind,
            lambda cache: plain.flatten_fn(without_lengths(cache)),
            lambda leaves, context: with_lengths(plain.unflatten_fn(leaves, context)),
            serialized_type_name=f"{kind.__module__}:{kind.__qualname__}",
            flatten_with_keys_fn=None if keyed is None else lambda cache: keyed(without_lengths(cache)),
        )
    lookup = getattr(exporter, "_path_to_class", None)
    if lookup is not None:
        torch.compiler.assume_constant_result(lookup)  # type: ignore[no-untyped-call]  # so it is in torch


class _AnyObject:
    """Registered in place of a class of caches, to get the functions by which transformers flattens such objects."""


class CacheReturn:
    """The forward hook of a captured graph module that takes caches: it changes the caller's cache, as the model does.

    The graph takes the contents of a cache and returns the new contents in a new object. The hook moves them into the
    caller's cache, and puts the caller's cache into the output. `places` has, by the name of an input, the key or index
    of the output that is this input.
    """

    def __init__(self, places: Mapping[str, Any]) -> None:
        self.places = dict(places)

    def __call__(self, module: Any, args: tuple[object, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Return the output with the caller's caches in it."""
        given = module._input_binding.by_name(args, kwargs)
        result: Any = list(output) if isinstance(output, tuple) else output
        for name, place in self.places.items():
            cache, new = given[name], vars(result[place])
            for gone in [each for each in vars(cache) if each not in new]:
                delattr(cache, gone)
            for attribute, value in new.items():
                setattr(cache, attribute, value)
            result[place] = cache
        return type(output)(result) if isinstance(output, tuple) else result


_COUNT = "cumulative_length"
_KEYS = "keys"
#: Replaces the number.
_LENGTH = "keys.shape[-2]"
Kind = TypeVar("Kind")


def without_lengths(cache: Kind) -> Kind:
    """Return a copy of a cache, or of a cache of caches, without counts that equal the number of keys.

    Keys are of shape (batch, heads, tokens, features).
    """
    copied = _copied(cache)
    for name, value in vars(cache).items():
        if _is_cache_like(value):
            vars(copied)[name] = without_lengths(value)
        elif type(value) is list:
            vars(copied)[name] = [_without_length(layer) for layer in value]
    return copied


def with_lengths(cache: Kind) -> Kind:
    """Restore in place the numbers that `without_lengths` has removed from a cache; return the cache."""
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
    """Return whether a layer's number is the size of its keys; in a trace, whether it was read from this size.

    A number that the traced model has computed is an output of the graph, even if it is equal: whether torch knows that
    it is differs between traces, and these have to agree.
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
    # A cache has a list of layers, and an `EncoderDecoderCache` has two such caches.
    return isinstance(getattr(value, "layers", None), list)


def _copied(value: Kind) -> Kind:
    """Return an object with the same attributes, without the copy methods of its class."""
    copied = object.__new__(type(value))
    vars(copied).update(vars(value))
    return copied
