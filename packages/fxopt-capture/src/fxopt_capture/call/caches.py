"""Caches of keys and values, which models of the transformers library take, change in place and return.

A layer with a sliding window counts its tokens in a Python number, ``cumulative_length``, besides the keys and values
of those still within the window. For torch's pytrees that number is a constant, so that a graph would be right for one
length. Until the window is full, it is the number of keys, and is written so here: the graph then takes any length
below that.
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
    """Whether `value` is a cache of the transformers library; does not import it.

    >>> is_cache([torch.ones(1)])
    False
    """
    return is_cache_type(type(value))


def is_cache_type(kind: object) -> bool:
    """Whether `kind` is a class of caches."""
    loaded = sys.modules.get(CACHES_MODULE)
    return loaded is not None and isinstance(kind, type) and issubclass(kind, loaded.Cache)


def register_cache_types() -> None:
    """Register all classes of caches that have been loaded; transformers would, in its own way, those left out."""
    waiting = [sys.modules[CACHES_MODULE].Cache] if CACHES_MODULE in sys.modules else []
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        register_cache_type(kind)


def register_cache_type(kind: type) -> None:
    """Make torch's pytrees see into one class of caches, as transformers' exporters do.

    In addition, layers with a sliding window say the number of their tokens by the size of their keys, so that a graph
    can take another number. Registering a class lasts for the process, and changes nothing else
    about it. Besides, `torch.compile` is told to take the class of a cache that a graph returns for a constant: it
    cannot follow how transformers looks it up.
    """
    exporter = importlib.import_module("transformers.exporters.exporter_dynamo")
    if kind not in pytree.SUPPORTED_NODES:
        exporter.register_pytree_node(_AnyObject)
        _register(kind, pytree.SUPPORTED_NODES[_AnyObject])
    lookup = getattr(exporter, "_path_to_class", None)
    if lookup is not None:
        torch.compiler.assume_constant_result(lookup)  # type: ignore[no-untyped-call]  # so it is in torch


def _register(kind: type, plain: pytree.NodeDef) -> None:
    """Register a class of caches by what flattens any object, around which lengths are taken out and put in."""
    keyed = plain.flatten_with_keys_fn

    def flatten_with_keys(cache: Any) -> Any:
        return None if keyed is None else keyed(without_lengths(cache))

    pytree.register_pytree_node(
        kind,
        lambda cache: plain.flatten_fn(without_lengths(cache)),
        lambda leaves, context: with_lengths(plain.unflatten_fn(leaves, context)),
        serialized_type_name=f"{kind.__module__}:{kind.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys if keyed is not None else None,
    )


class _AnyObject:
    """Registered in place of a class of caches, to learn how transformers flattens such objects."""


class CacheReturn:
    """The forward hook of a captured graph module that takes caches: changes the caller's own, as the model does.

    The graph takes what is in a cache and returns what is in it afterwards, in a new object. This puts that into the
    caller's cache, and the caller's cache into the output. `places` has, by the name of an input, the key or index of
    the output that is this input.
    """

    def __init__(self, places: Mapping[str, Any]) -> None:
        self.places = dict(places)

    def __call__(self, module: Any, args: tuple[object, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Return the output with the caller's caches in it."""
        given = module._input_binding.by_name(args, kwargs)
        result: Any = list(output) if isinstance(output, tuple) else output
        for name, place in self.places.items():
            cache = given[name]
            _assign(cache, result[place])
            result[place] = cache
        return type(output)(result) if isinstance(output, tuple) else result


def _assign(cache: Any, new: Any) -> None:
    """Give a cache the attributes of another one."""
    attributes = vars(new)
    for name in [name for name in vars(cache) if name not in attributes]:
        delattr(cache, name)
    for name, value in attributes.items():
        setattr(cache, name, value)


_COUNT = "cumulative_length"
_KEYS = "keys"
_LENGTH = "keys.shape[-2]"
"""What stands in place of the number."""
Kind = TypeVar("Kind")


def without_lengths(cache: Kind) -> Kind:
    """Return a copy of a cache, or of a cache of caches, in which no layer counts what the size of its keys says.

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
