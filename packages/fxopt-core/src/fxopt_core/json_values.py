"""Values of records as plain JSON data, and back: equal values of equal types return, in any process.

A tuple is a JSON array, since records are made of them. What JSON has no form for is an object with one entry, whose
key says what it is: ``{"list": [...]}``, ``{"dtype": "float32"}``, ``{"name": "torch.nn.functional:relu"}``.
"""

from __future__ import annotations

import base64
import enum
import json
import sys
import types
import typing
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx.traceback import NodeSource

from fxopt_core.encoding import importable_name
from fxopt_core.errors import FxoptError
from fxopt_core.ledger_rows import Unresolved
from fxopt_core.references import describe, operator_path

Encode = Callable[[Any], Any]
_OPERATORS = "torch:ops."


class InexpressibleError(FxoptError):
    """A value has no form in JSON."""


class MalformedError(FxoptError):
    """JSON data says no value."""


def name_of(value: Any) -> str | None:
    """Return ``"module:qualified.name"`` of a function, a class or an operator; None if it has no such name.

    >>> name_of(torch.conv2d), name_of(torch.ops.aten.add.Tensor), name_of(lambda: 0)
    ('torch:conv2d', 'torch:ops.aten.add.Tensor', None)
    """
    path = operator_path(value)
    if path:
        name = _OPERATORS + ".".join(path)
        return name if find(name) is value else None
    if value is type(None):
        return "types:NoneType"
    return importable_name(value) if callable(value) and hasattr(value, "__qualname__") else None


def find(name: str) -> Any:
    """Return what has a name, where its module is loaded, else an `Unresolved`; nothing is imported.

    >>> find("math:sqrt"), find("nowhere:function")
    (<built-in function sqrt>, Unresolved(name='nowhere:function', form=None))
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    try:
        for part in path.split("."):
            found = getattr(found, part)
    except Exception:  # whatever computing the attribute raises
        return Unresolved(name)
    return found


class ValueWriter:
    """Writes values.

    Args:
        own: for classes of one's own, the function that writes their instances.
        objects: a list that takes what JSON has no form for, so that its place there is written; None makes that an
            error.
    """

    def __init__(self, own: dict[type, Callable[[ValueWriter, Any], Any]], objects: list[object] | None = None) -> None:
        self._own = own
        self._objects = objects

    def write(self, value: Any) -> Any:
        """Return a value as JSON data.

        Raises:
            InexpressibleError: There is no form for it.
        """
        cls = type(value)
        if cls in _AS_THEY_ARE:
            return value
        if cls is tuple:
            return [self.write(item) for item in value]
        if cls in self._own:
            return self._own[cls](self, value)
        form = next(_forms(value, self.write), None)
        return self._other(value) if form is None else form

    def _other(self, value: Any) -> Any:
        name = name_of(value)
        if name is not None:
            return {"name": name}
        if self._objects is None:
            raise InexpressibleError(f"found {describe(value)}, which JSON data cannot express")
        self._objects.append(value)
        return {"object": len(self._objects) - 1}


_AS_THEY_ARE = frozenset({str, int, bool, type(None)})


def _forms(value: Any, write: Encode) -> Iterator[Any]:
    """Yield the form of a value that is none of the plainest, if there is one."""
    writer = _WRITERS.get(type(value))
    if writer is not None:
        yield writer(value, write)
    elif isinstance(value, enum.Enum) and name_of(type(value)):
        yield {"enum": [name_of(type(value)), write(value.value)]}
    elif isinstance(value, tuple) and hasattr(value, "_fields") and name_of(type(value)):
        yield {"namedtuple": [name_of(type(value)), [write(item) for item in value]]}
    elif isinstance(value, list):  # torch's immutable ones, too
        yield {"list": [write(item) for item in value]}
    elif isinstance(value, dict):
        kind = "ordered_dict" if isinstance(value, OrderedDict) else "dict"
        yield {kind: [[write(key), write(item)] for key, item in value.items()]}
    elif typing.get_origin(value) is not None:
        yield from _generic_form(value, write)


def _generic_form(value: Any, write: Encode) -> Iterator[Any]:
    """Yield the form of a type with parameters, such as ``Optional[Tensor]``."""
    origin, name = typing.get_origin(value), getattr(value, "_name", None)
    if origin in (typing.Union, types.UnionType):
        yield {"union": [write(item) for item in typing.get_args(value)]}
    elif isinstance(name, str) and hasattr(typing, name) and type(value).__module__ == "typing":
        yield {"generic": [{"name": f"typing:{name}"}, [write(item) for item in typing.get_args(value)]]}
    elif isinstance(value, types.GenericAlias):
        yield {"generic": [write(origin), [write(item) for item in typing.get_args(value)]]}


def _float_form(value: float, _: Encode) -> Any:
    return value if value - value == 0 else {"float": repr(value)}


def _text_form(key: str) -> Callable[[Any, Encode], Any]:
    return lambda value, _: {key: str(value).removeprefix("torch.")}


_WRITERS: dict[type, Callable[[Any, Encode], Any]] = {
    float: _float_form,
    complex: lambda value, _: {"complex": [repr(value.real), repr(value.imag)]},
    bytes: lambda value, _: {"bytes": base64.b64encode(value).decode()},
    type(Ellipsis): lambda value, _: {"ellipsis": None},
    slice: lambda value, write: {"slice": [write(value.start), write(value.stop), write(value.step)]},
    range: lambda value, _: {"range": [value.start, value.stop, value.step]},
    set: lambda value, write: {"set": [write(item) for item in sorted(value, key=repr)]},
    frozenset: lambda value, write: {"frozenset": [write(item) for item in sorted(value, key=repr)]},
    torch.Size: lambda value, write: {"size": [write(item) for item in value]},
    torch.dtype: _text_form("dtype"),
    torch.device: _text_form("device"),
    torch.layout: _text_form("layout"),
    torch.memory_format: _text_form("memory_format"),
    NodeSource: lambda value, _: {"source": value.to_dict()},
    Unresolved: lambda value, _: {"name": value.name} if value.form is None else json.loads(value.form),
}


class ValueReader:
    """Reads values.

    Args:
        own: for each key of one's own, the function that reads its content.
        objects: what `ValueWriter` had no form for.
    """

    def __init__(self, own: dict[str, Callable[[ValueReader, Any], Any]], objects: Sequence[object] = ()) -> None:
        self._own = own
        self._objects = objects

    def read(self, data: Any) -> Any:
        """Return the value of JSON data.

        Raises:
            MalformedError: It is none of a value.
        """
        if isinstance(data, list):
            return tuple(self.read(item) for item in data)
        if not isinstance(data, dict):
            return data
        if len(data) != 1:
            raise MalformedError(f"found an object with {len(data)} entries, expected one that says what it is")
        ((key, content),) = data.items()
        if key in self._own:
            return self._own[key](self, content)
        if key not in _READERS and key != "object":
            raise MalformedError(f"found a value of unknown kind {key!r}")
        try:
            return self._objects[content] if key == "object" else _READERS[key](content, self.read)
        except MalformedError:
            raise
        except Exception as error:  # whatever the content's wrong types lead to
            raise MalformedError(f"found {str(content)[:60]!r}, which is no {key} ({error})") from error


def _constant(kind: type) -> Callable[[Any, Encode], Any]:
    def read(name: Any, _: Encode) -> Any:
        found = getattr(torch, name)
        if type(found) is not kind:
            raise ValueError(f"torch.{name} is something else")
        return found

    return read


def _called(key: str, base: type, call: Callable[[Any, Any], Any]) -> Callable[[Any, Encode], Any]:
    """Return the reader of instances of a class, which may not be loaded."""

    def read_instance(data: Any, read: Encode) -> Any:
        name, content = data
        cls = find(name)
        if isinstance(cls, Unresolved):
            return Unresolved(name, json.dumps({key: data}))
        if not issubclass(cls, base):
            raise ValueError(f"{name} is a {cls!r}")
        return call(cls, read(content))

    return read_instance


def _generic(data: Any, read: Encode) -> Any:
    origin, arguments = read(data[0]), read(data[1])
    return (
        Unresolved(origin.name, json.dumps({"generic": data})) if isinstance(origin, Unresolved) else origin[arguments]
    )


_READERS: dict[str, Callable[[Any, Encode], Any]] = {
    "float": lambda content, _: float(content),
    "complex": lambda content, _: complex(float(content[0]), float(content[1])),
    "bytes": lambda content, _: base64.b64decode(content, validate=True),
    "ellipsis": lambda content, _: ...,
    "slice": lambda content, read: slice(*(read(item) for item in content)),
    "range": lambda content, _: range(*content),
    "set": lambda content, read: {read(item) for item in content},
    "frozenset": lambda content, read: frozenset(read(item) for item in content),
    "size": lambda content, read: torch.Size([read(item) for item in content]),
    "dtype": _constant(torch.dtype),
    "device": lambda content, _: torch.device(content),
    "layout": _constant(torch.layout),
    "memory_format": _constant(torch.memory_format),
    "source": lambda content, _: NodeSource._from_dict(content),
    "name": lambda content, _: find(content),
    "enum": _called("enum", enum.Enum, lambda cls, value: cls(value)),
    "namedtuple": _called("namedtuple", tuple, lambda cls, items: cls(*items)),
    "list": lambda content, read: [read(item) for item in content],
    "dict": lambda content, read: {read(key): read(item) for key, item in content},
    "ordered_dict": lambda content, read: OrderedDict((read(key), read(item)) for key, item in content),
    "union": lambda content, read: typing.Union[tuple(read(item) for item in content)],  # noqa: UP007
    "generic": _generic,
}
