"""The parts of any nested value by their paths, so that two values can be compared part by part.

Tuples, lists, mappings, dataclasses, named tuples, model outputs and other objects with attributes are containers;
tensors and everything else are compared as wholes. A path is the expression that leads to a part:
``output.logits[0]['key']``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TypeAlias

import torch
from torch import Tensor, nn

_OPAQUE = (type, Enum, nn.Module, FunctionType, BuiltinFunctionType, MethodType, ModuleType, torch.Size)
_UNIQUE = (type, Enum, ModuleType, torch.dtype, torch.layout, torch.memory_format)  # equal only if identical
_VALUES = (int, float, complex, str, bytes)  # even with attributes, only the value counts
_Parts: TypeAlias = tuple[str, "type | None", Iterable[tuple[str, object]]]  # kind, class and contents of a container


@dataclass(frozen=True)
class Above:
    """Replaces an object that contains itself, this many levels up."""

    levels: int


@dataclass(frozen=True)
class Container:
    """Replaces a container, whose contents are parts of their own.

    Attributes:
        kind: "tuple", "list", "dict" or the name of its class; different kinds are different structures.
        cls: its class, None for plain containers.
        size: how many contents it has.
    """

    kind: str
    cls: type | None
    # Not compared, since contents that are missing or new are reported at their own paths.
    size: int = field(compare=False)


def parts_of(value: object, path: str, keep: Callable[[Tensor], Tensor] | None = None) -> dict[str, object]:
    """Return the parts of a value by their paths, in order, containers included.

    ``keep`` maps each tensor to its replacement, for example a copy.

    >>> [path for path in parts_of({"a": (1, None)}, "output")]
    ['output', "output['a']", "output['a'][0]", "output['a'][1]"]
    """
    found: dict[str, object] = {}

    def visit(value: object, path: str, above: tuple[int, ...]) -> None:
        while path in found:  # different keys may have the same repr
            path += "'"
        if id(value) in above:
            found[path] = Above(len(above) - above.index(id(value)))
        elif isinstance(value, Tensor):
            found[path] = value if keep is None else keep(value)
        elif (parts := _parts(value)) is None:
            found[path] = value
        else:
            items = list(parts[2])
            found[path] = Container(parts[0], parts[1], len(items))
            for step, item in items:
                visit(item, f"{path}{step}", (*above, id(value)))

    visit(value, path, ())
    return found


def tensors(parts: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the tensors among parts."""
    return {path: value for path, value in parts.items() if isinstance(value, Tensor)}


def equal(a: object, b: object) -> bool:
    """Return whether two values are known to be equal."""
    if a is b:
        return True
    try:
        same: object = a == b
        every = getattr(same, "all", None)  # arrays compare element by element
        return bool(same if every is None else every())
    except Exception:  # not comparable, so not known to be equal
        return False


def has_value(value: object) -> bool:
    """Return whether values of this type can be equal without being identical.

    >>> has_value({1, 2}), has_value(iter([1])), has_value({torch.ones(1)})
    (True, False, False)
    """
    if isinstance(value, (set, frozenset)):
        # Tensors hash by identity, so sets of different tensors are never equal.
        return not any(isinstance(item, Tensor) or not has_value(item) for item in value)
    # With the `__eq__` of `object`, a value equals only itself, and each run works on copies.
    return isinstance(value, _UNIQUE) or type(value).__eq__ is not object.__eq__


def _parts(value: object) -> _Parts | None:
    """Return kind, class and contents of a container, or None for other values."""
    if isinstance(value, (*_OPAQUE, *_VALUES)):
        return None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _named(value, zip(value._fields, value, strict=True))
    if isinstance(value, (tuple, list, deque)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return kind, None, ((f"[{place}]", item) for place, item in enumerate(value))
    if isinstance(value, Mapping):
        if hasattr(value, "__dataclass_fields__"):  # a model output is both a dataclass and a mapping
            return _named(value, value.items())
        return "dict", None, ((f"[{key!r}]", item) for key, item in value.items())
    if is_dataclass(value):
        return _named(value, ((field.name, getattr(value, field.name)) for field in fields(value)))
    attributes = getattr(value, "__dict__", {})
    return _named(value, attributes.items()) if attributes else None


def _named(value: object, items: Iterable[tuple[object, object]]) -> _Parts:
    return type(value).__qualname__, type(value), ((f".{name}", item) for name, item in items)
