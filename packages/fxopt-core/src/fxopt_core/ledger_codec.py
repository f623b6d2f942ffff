"""The ledger as JSON text, and back: what a pickle and an archive of a graph module hold of it.

The text is an object: ``{"fxopt_ledger": version, "next_id": ..., "next_run": ..., "records": [...]}``. A record, a row
or an operation is an object with one entry, its class and an object of its fields without those that have their
defaults; values inside are written by `fxopt_core.json_values`. Nothing is imported by reading.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import types
import typing
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fxopt_core import ledger as ledger_module, ledger_rows
from fxopt_core.errors import FxoptError
from fxopt_core.garbage import collector_paused
from fxopt_core.json_values import InexpressibleError, MalformedError, ValueReader, ValueWriter
from fxopt_core.ledger import (
    LEDGER_VERSION,
    Derived,
    Ledger,
    Record,
    Refusal,
    Rewrite,
    check_version,
    restore_ledger,
    sealed_parts,
)
from fxopt_core.ledger_rows import (
    Listed,
    ModuleAdded,
    ModuleRemoved,
    ModuleRow,
    Neutral,
    NodeAdded,
    NodeRemoved,
    NodeReplaced,
    NodeRow,
    Piece,
    Ref,
    TensorRemoved,
    TensorRow,
    UsersOrdered,
)
from fxopt_core.marks import NodeTag

_KEY = "fxopt_ledger"
_CLASSES: tuple[type[Any], ...] = (
    Record, Refusal, Rewrite, Derived, Listed, ModuleAdded, ModuleRemoved, ModuleRow, Neutral, NodeAdded, NodeRemoved,
    NodeReplaced, NodeRow, Piece, Ref, TensorRemoved, TensorRow, UsersOrdered, NodeTag,
)  # fmt: skip
_NAMED = {"NodeRow": "node", "ModuleRow": "module", "TensorRow": "tensor", "Record": "pass"}
T = TypeVar("T")


def ledger_to_json(ledger: Ledger) -> str:
    """Write a ledger as text.

    A ledger that a newer version of fxopt wrote comes back as it was read.

    Raises:
        FxoptError: A value in it has no form in JSON; node, module or pass and the value are named. Of a node's
            ``meta``, such values are left out instead.

    >>> ledger_to_json(Ledger())
    '{"fxopt_ledger":1,"next_id":0,"next_run":0,"records":[]}'
    >>> ledger_from_json(ledger_to_json(Ledger())) == Ledger()
    True
    """
    return _to_text(ledger, None)


def ledger_from_json(text: str) -> Ledger:
    """Read a ledger that `ledger_to_json` has written.

    Returns:
        The ledger. One that a newer version of fxopt wrote stays as it is: everything that asks for its records is an
        error that names the version, and writing it loses nothing.

    Raises:
        FxoptError: The text is no ledger; the place and what was found there are named.
    """
    return _checked("this ledger", lambda: _read_ledger(text, []))


def tag_to_json(tag: NodeTag) -> dict[str, Any]:
    """Return what fxopt knows of a node as plain JSON data.

    >>> tag_to_json(NodeTag(3, ("a1b2",), ("merge-linears", ("q", "k"))))
    {'id': 3, 'marks': ['a1b2'], 'origin': ['merge-linears', ['q', 'k']]}
    """
    content: dict[str, Any] = _WRITER._own[NodeTag](_WRITER, tag)["NodeTag"]
    return content


def tag_from_json(data: object) -> NodeTag:
    """Read what `tag_to_json` has written.

    Raises:
        FxoptError: The data says no tag.

    >>> tag_from_json({"marks": ["a1b2"]})
    NodeTag(id=None, marks=('a1b2',), origin=None, name=None)
    """
    return _checked("what fxopt knows of a node", lambda: _read_fields(NodeTag, _reader([]), data))


def pack(ledger: Ledger) -> tuple[bytes, bytes]:
    """Return what a pickle holds of a ledger: its compressed text, and a pickle of what JSON has no form for."""
    objects: list[object] = []
    text = _to_text(ledger, objects)
    return _compress(text), pickle.dumps(objects) if objects else b""


def unpack(text: bytes, objects: bytes) -> Ledger:
    """Return the ledger that `pack` has taken apart.

    Raises:
        FxoptError: The text says no ledger.
    """

    def read() -> Ledger:
        return _read_ledger(_expand(text), pickle.loads(objects) if objects else [])

    return _checked("the ledger of this pickle", read)


def _compress(text: str) -> bytes:
    return zlib.compress(text.encode("utf-8", "surrogatepass"), 1)  # fast rather than small


def _expand(data: bytes) -> str:
    return zlib.decompress(data).decode("utf-8", "surrogatepass")


# -- writing -------------------------------------------------------------------------------------------------------


def _to_text(ledger: Ledger, objects: list[object] | None) -> str:
    sealed = sealed_parts(ledger)
    if sealed is not None and ledger.version > LEDGER_VERSION:
        if sealed[1]:
            check_version(ledger)  # the text alone would not be all of it
        return _expand(sealed[0])
    write = ValueWriter(_OWN_WRITERS, objects).write
    numbers = {_KEY: ledger.version, "next_id": ledger.next_id, "next_run": ledger.next_run}
    with collector_paused():
        records = [write(record) for record in ledger.records]
        return json.dumps({**numbers, "records": records}, separators=(",", ":"))


def _write_fields(writer: ValueWriter, item: Any) -> Any:
    cls = type(item)
    content: dict[str, Any] = {}
    for name, default in _DEFAULTS[cls]:
        value = getattr(item, name)
        if type(value) is not type(default) or value != default:
            content[name] = _write_field(writer, item, name, value)
    return {cls.__name__: content}


def _write_field(writer: ValueWriter, item: Any, name: str, value: Any) -> Any:
    if name == "meta":
        return _write_meta(writer, value)
    try:
        return writer.write(value)
    except InexpressibleError as error:
        kind = _NAMED.get(type(item).__name__)
        if kind is None:
            raise
        owner = getattr(item, "pass_name", None) or item.name
        raise InexpressibleError(f"{kind} `{owner}`, {name}: {error}") from error


def _write_meta(writer: ValueWriter, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Write of a node's ``meta`` what can be written, and leave the rest behind."""
    written = {}
    for key, value in meta.items():
        own = ValueWriter(_OWN_WRITERS)
        try:
            written[key] = own.write(value)
        except (InexpressibleError, RecursionError):
            continue
    return written


_DEFAULTS: dict[type, tuple[tuple[str, object], ...]] = {
    cls: tuple((field.name, field.default) for field in dataclasses.fields(cls) if field.name != "ledger")
    for cls in (*_CLASSES, Ledger)
}
_OWN_WRITERS: dict[type, Callable[[ValueWriter, Any], Any]] = dict.fromkeys(_CLASSES, _write_fields)
_WRITER = ValueWriter(_OWN_WRITERS)


# -- reading -------------------------------------------------------------------------------------------------------


def _checked(what: str, read: Callable[[], T]) -> T:
    try:
        with collector_paused():
            return read()
    except (MalformedError, ValueError, RecursionError, zlib.error) as error:
        raise FxoptError(
            f"{what} cannot be read: {error}; expected what fxopt_core.ledger_codec wrote, so it was cut off or changed"
        ) from error


def _read_ledger(text: str, objects: list[object]) -> Ledger:
    data = json.loads(text)
    version = data.get(_KEY) if isinstance(data, dict) else None
    if type(version) is not int or version < 1:
        raise MalformedError(f"found {text[:60]!r}, which has no version under {_KEY!r}")
    if version > LEDGER_VERSION:
        return restore_ledger(version, _compress(text), b"")
    del data[_KEY]
    return _read_fields(Ledger, _reader(objects), data)


def _reader(objects: list[object]) -> ValueReader:
    return ValueReader(_OWN_READERS, objects)


def _read_fields(cls: type[T], reader: ValueReader, content: Any) -> T:
    name = cls.__name__
    if not isinstance(content, dict):
        raise MalformedError(f"found {str(content)[:60]!r} as {name}, expected its fields")
    hints = _HINTS[cls]
    unknown = [key for key in content if key not in hints]
    if unknown:
        raise MalformedError(f"found {unknown[0]!r} in {name}, which has no such field")
    values = {key: _read_field(reader, name, key, item, hints[key]) for key, item in content.items()}
    missing = [key for key, default in _DEFAULTS[cls] if default is dataclasses.MISSING and key not in values]
    if [key for key in missing if key != "meta"]:
        raise MalformedError(f"{name} lacks {missing[0]!r}")
    return cls(**values)


def _read_field(reader: ValueReader, name: str, key: str, item: Any, hint: Any) -> Any:
    if key == "meta" and isinstance(item, dict):
        return types.MappingProxyType({entry: reader.read(value) for entry, value in item.items()})
    value = reader.read(item)
    if not _fits(value, hint):
        raise MalformedError(f"found {str(item)[:60]!r} as {key!r} of {name}, expected {hint}")
    return value


_HINTS: dict[type, dict[str, Any]] = {
    cls: typing.get_type_hints(cls, {**vars(ledger_rows), **vars(ledger_module)}) for cls in _DEFAULTS
}


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of a type as the fields of records have them."""
    if hint is Any or hint is object:
        return True
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and _items_fit(value, arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    return type(value) is hint or (hint is float and type(value) is int)


def _items_fit(items: tuple[Any, ...], hints: tuple[Any, ...]) -> bool:
    if hints[-1] is Ellipsis:
        return hints[0] is Any or all(_fits(item, hints[0]) for item in items)
    return len(items) == len(hints) and all(map(_fits, items, hints))


def _own_reader(cls: type[Any]) -> Callable[[ValueReader, Any], Any]:
    return lambda reader, content: _read_fields(cls, reader, content)


_OWN_READERS = {cls.__name__: _own_reader(cls) for cls in _CLASSES}
