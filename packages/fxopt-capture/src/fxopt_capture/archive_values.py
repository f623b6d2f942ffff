"""Values as JSON, and back: what arguments of nodes, attributes of layers and defaults of inputs consist of.

Numbers, strings, booleans, None and lists stand for themselves; everything else is an object with one key that says
what it is. Reading makes nothing but such values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from .archive_targets import target_name, target_of

Json = Any
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


class Unarchivable(Exception):
    """A value that an archive cannot hold; the message says which."""


def to_json(value: object, node: Callable[[Node], int] | None = None) -> Json:
    """Return a value as what `json` writes.

    Args:
        value: the value.
        node: from a node to its number; without it, nodes are no values.

    Raises:
        Unarchivable: the value, or one inside of it, cannot be archived.

    >>> to_json((1, 2.5, [torch.float32, slice(None, 3)]))
    {'tuple': [1, 2.5, [{'torch': 'float32'}, {'slice': [None, 3, None]}]]}
    """

    def many(values: Any) -> list[Json]:
        return [to_json(item, node) for item in values]

    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Node) and node is not None:
        return {"node": node(value)}
    if type(value) is torch.Size:
        return {"size": many(value)}
    if isinstance(value, list):
        return many(value)
    if type(value) is tuple:
        return {"tuple": many(value)}
    if isinstance(value, dict):
        return {"dict": [many(pair) for pair in value.items()]}
    return _other(value, many)


def _other(value: object, many: Callable[[Any], list[Json]]) -> Json:
    if type(value) in (set, frozenset):
        return {type(value).__name__: sorted(many(value), key=repr)}
    if isinstance(value, slice):
        return {"slice": many((value.start, value.stop, value.step))}
    if isinstance(value, range):
        return {"range": many((value.start, value.stop, value.step))}
    if type(value) is complex:
        return {"complex": many((value.real, value.imag))}
    if isinstance(value, _CONSTANTS):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if value is Ellipsis:
        return {"ellipsis": []}
    name = target_name(value)
    if name is None:
        raise Unarchivable(f"a value of type {type(value).__qualname__}")
    return {"target": name}


def from_json(data: Json, nodes: Sequence[Node] | None = None) -> Any:
    """Return the value that `to_json` has written.

    Raises:
        ValueError: it has not written this.

    >>> from_json({"tuple": [1, {"float": "inf"}, {"torch": "float32"}]})
    (1, inf, torch.float32)
    """
    if data is None or isinstance(data, bool | int | float | str):
        return data
    if isinstance(data, list):
        return [from_json(item, nodes) for item in data]
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError(f"{data!r:.60} is no value of an archive")
    ((kind, content),) = data.items()
    if kind == "node":
        return _node(content, nodes)
    reader = _READERS.get(kind)
    if reader is None:
        raise ValueError(f"{kind!r} is no kind of value of an archive")
    if kind in _OF_TEXT:
        if not isinstance(content, str):
            raise ValueError(f"{content!r:.60} is no name of a {kind}")
        return reader(content)
    if not isinstance(content, list):
        raise ValueError(f"{content!r:.60} is no content of a {kind}")
    return reader([from_json(item, nodes) for item in content])


def _node(index: object, nodes: Sequence[Node] | None) -> Node:
    if nodes is None or type(index) is not int or not 0 <= index < len(nodes):
        raise ValueError(f"there is no node number {index!r}")
    return nodes[index]


def _constant(name: str) -> object:
    found = getattr(torch, name, None)
    if not isinstance(found, _CONSTANTS):
        raise ValueError(f"torch.{name} is no dtype, layout or memory format")
    return found


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name!r} is no device: {error}") from error


_OF_TEXT = frozenset({"float", "torch", "device", "target"})
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "float": float,
    "torch": _constant,
    "device": _device,
    "target": target_of,
    "tuple": tuple,
    "dict": dict,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
    "slice": lambda parts: slice(*parts),
    "range": lambda parts: range(*parts),
    "ellipsis": lambda parts: ...,
    "complex": lambda parts: complex(*parts),
}
