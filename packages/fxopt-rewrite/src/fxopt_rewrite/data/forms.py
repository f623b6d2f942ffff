"""Values as data: one typed form, which JSON can hold, for ledgers, key maps and archives.

Text, numbers, booleans and None are themselves, and a tuple is an array. Everything else is an object whose one key
says what it is, ``{"dtype": "float32"}``: ``1``, ``1.0``, ``True`` and ``"1"`` differ, as do ``[1]`` and ``(1,)``.
`ValueReader` brings back equal values of equal types from what `ValueWriter` wrote, in any process.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import enum
import functools
import json
import types
import typing
from abc import ABCMeta
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.fx.traceback import NodeSource

from fxopt_core import class_path, describe
from fxopt_core.errors import FxoptError
from fxopt_rewrite._torch import source_from_dict
from fxopt_rewrite.data.policies import LOADED, Names, Unresolved

T = TypeVar("T")
Form = Any
Write = Callable[[Any], Form]


class InexpressibleError(FxoptError):
    """A value cannot be expressed as data."""


class MalformedError(FxoptError):
    """Data is not the form of any value."""


_AS_THEY_ARE = frozenset({str, bool, type(None)})
_NESTED = frozenset({list, dict})


def _text_form(key: str) -> Callable[[Any, Write], Form]:
    return lambda value, _: {key: str(value).removeprefix("torch.")}


def _many(key: str) -> Callable[[Any, Write], Form]:
    return lambda value, write: {key: [write(item) for item in value]}


def _sorted(key: str) -> Callable[[Any, Write], Form]:
    return lambda value, write: {key: sorted(map(write, value), key=json.dumps)}


def _pairs(key: str) -> Callable[[Any, Write], Form]:
    return lambda value, write: {key: [[write(name), write(item)] for name, item in value.items()]}


_FORMS: Mapping[type, Callable[[Any, Write], Form]] = {
    # In base 16, as Python refuses decimals of any length.
    int: lambda value, _: value if -(2**63) <= value < 2**63 else {"int": format(value, "x")},
    # JSON has neither infinities nor NaN.
    float: lambda value, _: value if value - value == 0 else {"float": repr(value)},
    complex: lambda value, _: {"complex": [repr(value.real), repr(value.imag)]},
    bytes: lambda value, _: {"bytes": base64.b64encode(value).decode()},
    type(Ellipsis): lambda value, _: {"ellipsis": None},
    list: _many("list"),
    set: _sorted("set"),
    frozenset: _sorted("frozenset"),
    dict: _pairs("dict"),
    OrderedDict: _pairs("ordered_dict"),
    slice: lambda value, write: {"slice": [write(value.start), write(value.stop), write(value.step)]},
    range: lambda value, _: {"range": [value.start, value.stop, value.step]},
    torch.Size: _many("size"),
    torch.dtype: _text_form("dtype"),
    torch.device: _text_form("device"),
    torch.layout: _text_form("layout"),
    torch.memory_format: _text_form("memory_format"),
    NodeSource: lambda value, _: {"source": value.to_dict()},
    Unresolved: lambda value, _: {"name": value.name} if value.form is None else json.loads(value.form),
}


# -- writing what can be read again


@dataclasses.dataclass(frozen=True, eq=False)
class ValueWriter:
    """Writes values.

    Attributes:
        own: for further classes, the function that writes their instances.
        objects: a list that collects values without a form, whose index is written; with None, they are an error.
        names: the policy for names.
    """

    own: Mapping[type, Callable[[ValueWriter, Any], Form]] = dataclasses.field(default_factory=dict)
    objects: list[object] | None = None
    names: Names = LOADED

    def write(self, value: Any) -> Form:
        """Return the form of a value.

        >>> ValueWriter().write((1, 2.5, [torch.float32, slice(None, 3)]))
        [1, 2.5, {'list': [{'dtype': 'float32'}, {'slice': [None, 3, None]}]}]
        """
        cls = type(value)
        if cls in _AS_THEY_ARE:
            return value
        if cls is tuple:
            return [self.write(item) for item in value]
        if cls in self.own:
            return self.own[cls](self, value)
        if cls in _FORMS:
            return _FORMS[cls](value, self.write)
        if isinstance(value, enum.Enum) and self.names.name(cls):
            return {"enum": [self.names.name(cls), self.write(value.value)]}
        if isinstance(value, tuple) and hasattr(value, "_fields") and self.names.name(cls):
            return {"namedtuple": [self.names.name(cls), [self.write(item) for item in value]]}
        for base in (list, OrderedDict, dict):  # torch's immutable ones, too
            if isinstance(value, base):
                return _FORMS[base](value, self.write)
        name = self.names.name(value)
        if name is not None:
            return {"name": name}
        if self.objects is None:
            raise InexpressibleError(f"found {describe(value)}, which data cannot express")
        self.objects.append(value)
        return {"object": len(self.objects) - 1}


# -- reading


@dataclasses.dataclass(frozen=True, eq=False)
class ValueReader:
    """Reads what `ValueWriter` wrote.

    Attributes:
        own: for each further key, the function that reads its content.
        objects: the values that had no form.
        names: the policy for names, which also finds them.
    """

    own: Mapping[str, Callable[[ValueReader, Any], Any]] = dataclasses.field(default_factory=dict)
    objects: Sequence[object] = ()
    names: Names = LOADED

    def read(self, form: Form) -> Any:
        """Return the value of a form."""
        if isinstance(form, list):
            return tuple([self.read(item) if type(item) in _NESTED else item for item in form])
        if not isinstance(form, dict):
            return form
        if len(form) != 1:
            raise MalformedError(f"found an object with {len(form)} entries, expected one that says what it is")
        ((key, content),) = form.items()
        if key in self.own:
            return self.own[key](self, content)
        if key not in _READERS:
            raise MalformedError(f"found a value of the unknown kind {key!r:.60}")
        try:
            return _READERS[key](self, content)
        except FxoptError:
            raise
        except Exception as error:  # whatever the content's wrong types lead to
            raise MalformedError(f"found {str(content)[:60]!r}, which is not a valid {key} ({error})") from error

    def _instance(self, key: str, base: type, data: Any, call: Callable[[Any, Any], Any]) -> Any:
        """Return an instance of a class, or an `Unresolved` if the class is not loaded."""
        name, content = data
        cls = self.names.cls(name)
        if isinstance(cls, Unresolved):
            return Unresolved(name, json.dumps({key: data}))
        if not issubclass(cls, base):
            raise ValueError(f"{name} is a {cls!r}")
        return call(cls, self.read(content))


def _constant(kind: type) -> Callable[[ValueReader, Any], Any]:
    def read(_: ValueReader, name: Any) -> Any:
        found = getattr(torch, name)
        if type(found) is not kind:
            raise ValueError(f"torch.{name} is something else")
        return found

    return read


def _entries(reader: ValueReader, content: Any) -> Iterator[tuple[Any, Any]]:
    return ((reader.read(key), reader.read(item)) for key, item in content)


_READERS: dict[str, Callable[[ValueReader, Any], Any]] = {
    "int": lambda _, content: int(content if len(content) < 3500 else "", 16),  # Python prints 4300 decimals
    "float": lambda _, content: float(content),
    "complex": lambda _, content: complex(float(content[0]), float(content[1])),
    "bytes": lambda _, content: base64.b64decode(content, validate=True),
    "ellipsis": lambda _, content: ...,
    "list": lambda reader, content: [*map(reader.read, content)],
    "set": lambda reader, content: set(map(reader.read, content)),
    "frozenset": lambda reader, content: frozenset(map(reader.read, content)),
    "dict": lambda reader, content: dict(_entries(reader, content)),
    "ordered_dict": lambda reader, content: OrderedDict(_entries(reader, content)),
    "slice": lambda reader, content: slice(*map(reader.read, content)),
    "range": lambda _, content: range(*content),
    "size": lambda reader, content: torch.Size(map(reader.read, content)),
    "dtype": _constant(torch.dtype),
    "device": lambda _, content: torch.device(content),
    "layout": _constant(torch.layout),
    "memory_format": _constant(torch.memory_format),
    "source": lambda _, content: source_from_dict(content),
    "name": lambda reader, content: reader.names.function(content),
    "enum": lambda reader, data: reader._instance("enum", enum.Enum, data, lambda cls, value: cls(value)),
    "namedtuple": lambda reader, data: reader._instance("namedtuple", tuple, data, lambda cls, items: cls(*items)),
    "object": lambda reader, number: reader.objects[number],
}


# -- instances of frozen dataclasses: their fields, checked against the annotations


class Fields:
    """Writes and reads instances of dataclasses by their fields, as ``{"Name": {"field": ...}}``.

    Fields that have their defaults are left out, as are those that `repr` leaves out. Only those entries of a `Mapping`
    that have a form are written; on reading, it is read-only.

    Args:
        classes: the classes; `add` takes further ones.
    """

    def __init__(self, classes: Iterable[type[Any]] = ()) -> None:
        self.writers: dict[type, Callable[[ValueWriter, Any], Form]] = {}
        self.readers: dict[str, Callable[[ValueReader, Any], Any]] = {}
        self._defaults: dict[type, dict[str, object]] = {}
        for cls in classes:
            self.add(cls)

    def add(self, cls: type[T]) -> type[T]:
        """Add a class; usable as a decorator.

        Raises:
            FxoptError: Another class of this name has been added already.
        """
        for known in self.writers:
            if known.__name__ == cls.__name__ and class_path(known) != class_path(cls):
                raise FxoptError(
                    f"{class_path(cls)} has the name of {class_path(known)}, under which ledgers hold that; rename it"
                )
        fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(cls)  # type: ignore[arg-type]  # it is one
        missing = dataclasses.MISSING
        made = (each.default if each.default_factory is missing else each.default_factory() for each in fields)
        self._defaults[cls] = {each.name: default for each, default in zip(fields, made, strict=True) if each.repr}
        hints = typing.get_type_hints(cls)
        named = ((name, hints[name]) for name in self._defaults[cls])
        own = {name: (hint, typing.get_origin(hint) is Mapping, _check_of(hint)) for name, hint in named}
        required = [name for name, default in self._defaults[cls].items() if default is missing]
        self.writers[cls] = self._write
        self.readers[cls.__name__] = functools.partial(_read_instance, cls, own, required)
        return cls

    def _write(self, writer: ValueWriter, item: Any) -> Form:
        cls = type(item)
        content: dict[str, Form] = {}
        for name, default in self._defaults[cls].items():
            value = getattr(item, name)
            # By type as well, since 1, 1.0 and True are equal.
            if type(value) is not type(default) or value != default:
                content[name] = self._write_field(writer, item, name, value)
        return {cls.__name__: content}

    def _write_field(self, writer: ValueWriter, item: Any, name: str, value: Any) -> Form:
        if isinstance(value, types.MappingProxyType):
            entries = {}
            for key, entry in value.items():
                with contextlib.suppress(InexpressibleError, RecursionError):
                    entries[key] = ValueWriter(self.writers).write(entry)
            return entries
        try:
            return writer.write(value)
        except InexpressibleError as error:
            if name == "type_expr":  # an annotation that is no class, which torch does not read
                return None
            owner = getattr(item, "pass_name", getattr(item, "name", None))
            if owner is None:
                raise
            kind = type(item).__name__.removesuffix("Row").lower()  # node, module, tensor, record
            raise InexpressibleError(f"{kind} `{owner}`, {name}: {error}") from error


_Field = tuple[Any, bool, Callable[[Any], bool]]  # the annotation, whether it is a mapping, whether a value fits


def _read_instance(
    cls: type[T], fields: Mapping[str, _Field], required: Iterable[str], reader: ValueReader, content: Any
) -> T:
    if not isinstance(content, dict):
        raise MalformedError(f"found {str(content)[:60]!r} as {cls.__name__}, expected its fields")
    values = {}
    for key, form in content.items():
        if key not in fields:
            raise MalformedError(f"found {key!r:.60} in {cls.__name__}, which has no such field")
        hint, is_mapping, fits = fields[key]
        if is_mapping and isinstance(form, dict):
            values[key] = types.MappingProxyType({entry: reader.read(value) for entry, value in form.items()})
            continue
        values[key] = value = reader.read(form) if type(form) in _NESTED else form
        if not fits(value) or (type(form) is int and not -(2**63) <= form < 2**63):
            raise MalformedError(f"found {str(form)[:60]!r} as {key!r} of {cls.__name__}, expected {hint}")
    for key in required:
        if key not in values:
            raise MalformedError(f"{cls.__name__} lacks {key!r}")
    return cls(**values)


def _check_of(hint: Any) -> Callable[[Any], bool]:
    """Return a function that tells whether a value is of an annotated type.

    >>> _check_of(tuple[int, ...])((1, 2)), _check_of(int)(True), _check_of(float | None)(1)
    (True, False, True)
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    checks = [] if origin is typing.Literal else [*map(_check_of, arguments)]
    if hint in (Any, object):
        return lambda value: True
    if origin is tuple and arguments[-1] is Ellipsis:
        return lambda value: isinstance(value, tuple) and all(map(checks[0], value))
    if origin is tuple:
        return lambda value: isinstance(value, tuple) and _items_fit(value, checks)
    if origin is typing.Literal:
        return lambda value: value in arguments
    if origin in (typing.Union, types.UnionType):
        return lambda value: any(fit(value) for fit in checks)
    if isinstance(hint, ABCMeta):
        return lambda value: isinstance(value, hint)
    return lambda value: type(value) is hint or (hint is float and type(value) is int)


def _items_fit(items: tuple[Any, ...], checks: Sequence[Callable[[Any], bool]]) -> bool:
    return len(items) == len(checks) and all(fit(item) for fit, item in zip(checks, items, strict=True))
