"""The classes of passes that this process has defined, by their paths: one inside of a function cannot be imported."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from fxopt_core.recalling import import_class

_KNOWN: WeakValueDictionary[str, type] = WeakValueDictionary()


def class_path(cls: type) -> str:
    """Return ``"module:qualified.name"`` of a class.

    >>> class_path(int)
    'builtins:int'
    """
    return f"{cls.__module__}:{cls.__qualname__}"


def note_class(cls: type) -> None:
    """Take notice of a class, for as long as it lives."""
    _KNOWN[class_path(cls)] = cls


def find_class(path: str) -> Any:
    """Return the class with this path: what can be imported, or else the class of that path that was defined last.

    Raises:
        ImportError: There is no such module.
        AttributeError: The module has no such name, and no such class was defined.
    """
    try:
        return import_class(path)
    except (ImportError, AttributeError):
        known = _KNOWN.get(path)
        if known is None:
            raise
        return known
