"""Other values for an option, found by its annotation."""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, Union

import torch

from fxopt_core import OptionInfo


def other_values(info: OptionInfo, current: object) -> Iterator[object]:
    """Yield values of an option's type that differ from the current one; none where the type is not known."""
    for value in _values(info.annotation, current):
        if type(value) is not type(current) or value != current:
            yield value


def _values(annotation: Any, current: Any) -> Iterator[object]:
    origin = typing.get_origin(annotation)
    if origin in (Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _values(member, current)
    elif origin is Literal:
        yield from typing.get_args(annotation)
    elif annotation is bool:
        yield not current
    elif annotation is int:
        yield from (current + 1, current + 2, current * 4) if type(current) is int else (3, 1)
    elif annotation is float:
        yield from (current * 2.0, current + 0.5) if isinstance(current, (int, float)) else (0.5,)
    elif annotation is str:
        yield from ("q*", "other")
    elif annotation is torch.dtype:
        yield from (torch.float64, torch.float32)
    elif annotation in (type(None), None):
        yield None
    elif isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        yield from annotation
    elif origin in (list, tuple, set, frozenset) and current is not None:
        yield from _of_container(origin, typing.get_args(annotation), current)


def _of_container(origin: Any, members: tuple[Any, ...], current: Any) -> Iterator[object]:
    if origin is not tuple or members[1:] == (Ellipsis,):
        item = next(iter(_values(members[0] if members else str, None)), "other")
        yield origin([*current, item])
