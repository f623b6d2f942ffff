"""Caches of keys and values, which models of the transformers library take, change in place and return."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .cache_lengths import with_lengths, without_lengths

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
    can take another number; see `cache_lengths`. Registering a class lasts for the process, and changes nothing else
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
    caller's cache, and the caller's cache into the output.

    Args:
        places: name of an input -> the key or index of the output that is this input.
    """

    def __init__(self, places: Mapping[str, Any]) -> None:
        self.places = dict(places)

    def __call__(self, module: object, args: tuple[object, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Return the output with the caller's caches in it."""
        result: Any = list(output) if isinstance(output, tuple) else output
        for name, place in self.places.items():
            cache = kwargs[name]
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
