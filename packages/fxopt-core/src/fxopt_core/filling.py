"""Frozen dataclasses that are made by the thousand: an ``__init__`` that sets all attributes at once."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

ClassT = TypeVar("ClassT", bound=type)


def filled_at_once(cls: ClassT) -> ClassT:
    """Give a frozen dataclass an ``__init__`` with the same parameters that takes a third of the time.

    The one of a frozen dataclass goes through ``object.__setattr__`` for each attribute. For classes without
    ``__post_init__`` and slots.

    >>> from dataclasses import dataclass
    >>> @filled_at_once
    ... @dataclass(frozen=True)
    ... class Point:
    ...     x: int
    ...     y: int = 0
    >>> Point(1), Point(y=2, x=1)
    (Point(x=1, y=0), Point(x=1, y=2))
    """
    known = [each for each in fields(cls) if each.init]
    defaults: dict[str, object] = {f"_default_{each.name}": each.default for each in known}
    factories = {f"_factory_{each.name}": each.default_factory for each in known}
    parameters = ", ".join(map(_parameter, known))
    values = ", ".join(f"{each.name!r}: {_value(each)}" for each in known)
    names: dict[str, Any] = {**defaults, **factories, "_MISSING": MISSING, "_set": object.__setattr__}
    exec(f"def __init__(self, {parameters}):\n    _set(self, '__dict__', {{{values}}})\n", names)  # as dataclasses do
    made = names["__init__"]
    former: Any = vars(cls)["__init__"]
    made.__qualname__, made.__module__ = former.__qualname__, cls.__module__
    made.__annotations__ = dict(former.__annotations__)
    cls.__init__ = made  # type: ignore[misc]  # that is what this is for
    return cls


def _parameter(field: Field[Any]) -> str:
    if field.default_factory is not MISSING:
        return f"{field.name}=_MISSING"
    return field.name if field.default is MISSING else f"{field.name}=_default_{field.name}"


def _value(field: Field[Any]) -> str:
    if field.default_factory is MISSING:
        return field.name
    return f"_factory_{field.name}() if {field.name} is _MISSING else {field.name}"
