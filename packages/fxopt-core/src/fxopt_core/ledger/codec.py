"""The ledger as JSON text, and back: what a pickle and an archive of a graph module hold of it.

The text is an object: ``{"fxopt_ledger": version, "next_id": ..., "next_run": ..., "records": [...]}``. Records, and
the edits in their journals, are written by `fxopt_core.values.forms.Fields`. Nothing is imported by reading.
"""

from __future__ import annotations

import copyreg
import json
import pickle
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import entry_points
from typing import Any, TypeVar

from fxopt_core.errors import FxoptError
from fxopt_core.gc_pause import collector_paused
from fxopt_core.ledger.marks import NodeTag
from fxopt_core.ledger.records import (
    LEDGER_VERSION,
    Derived,
    Ledger,
    Record,
    Refusal,
    Rewrite,
    check_version,
    reader_of,
    sealed_ledger,
)
from fxopt_core.values.forms import Fields, MalformedError, ValueReader, ValueWriter
from fxopt_core.values.names import LOADED, Names

T = TypeVar("T")
_KEY = "fxopt_ledger"
FIELDS = Fields(
    (Ledger, Record, Refusal, Rewrite, Derived, NodeTag),
    kinds={"NodeRow": "node", "ModuleRow": "module", "TensorRow": "tensor", "Record": "pass"},
)
stored = FIELDS.add
"""A decorator: lets instances of a dataclass be part of a ledger's text, under the name of the class.

Journals and kinds of edits are such classes. The module that defines one is an entry point of the group
``fxopt_journal``, which is loaded when a ledger with a journal is read.
"""


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


def ledger_from_json(text: str, names: Names = LOADED) -> Ledger:
    """Read a ledger that `ledger_to_json` has written; ``names`` says what the values in it may name.

    One that a newer version of fxopt wrote stays as it is: everything that asks for its records is an error that names
    the version, and writing it loses nothing.

    Raises:
        FxoptError: The text is no ledger; the place and what was found there are named.
    """
    return _checked("this ledger", lambda: _read_ledger(text, [], names))


def tag_to_json(tag: NodeTag) -> dict[str, Any]:
    """Return what fxopt knows of a node as plain JSON data.

    >>> tag_to_json(NodeTag(3, ("a1b2",), ("merge-linears", ("q", "k"))))
    {'id': 3, 'marks': ['a1b2'], 'origin': ['merge-linears', ['q', 'k']]}
    """
    content: dict[str, Any] = ValueWriter(FIELDS.writers).write(tag)["NodeTag"]
    return content


def tag_from_json(data: object) -> NodeTag:
    """Read what `tag_to_json` has written.

    >>> tag_from_json({"marks": ["a1b2"]})
    NodeTag(id=None, marks=('a1b2',), origin=None, name=None)
    """
    read: Callable[[], NodeTag] = partial(ValueReader(FIELDS.readers).read, {"NodeTag": data})
    return _checked("what fxopt knows of a node", read)


def restore_ledger(version: int, text: bytes, objects: bytes) -> Ledger:
    """Return a ledger from a pickle. Pickles of all versions name this function: it keeps its name and parameters.

    ``text`` is its JSON text, compressed, and ``objects`` a pickle of what JSON has no form for. The ledger is sealed:
    they are read when it is asked for something. Pickling it before that, or where this version of fxopt cannot read
    it, passes them on as they are.
    """
    return sealed_ledger(version, partial(_unpack, text, objects))


def _unpack(text: bytes, objects: bytes) -> Ledger:
    def read() -> Ledger:
        return _read_ledger(_expand(text), pickle.loads(objects) if objects else [])

    return _checked("the ledger of this pickle", read)


def _reduced(ledger: Ledger) -> tuple[Callable[[int, bytes, bytes], Ledger], tuple[int, bytes, bytes]]:
    """Pickle a ledger as text with its version, so that older versions of fxopt can read past one of a newer one."""
    sealed = reader_of(ledger)
    if sealed is not None:
        text, objects = sealed.args
        return restore_ledger, (ledger.version, text, objects)
    without_form: list[object] = []
    packed = _compress(_to_text(ledger, without_form))
    return restore_ledger, (ledger.version, packed, pickle.dumps(without_form) if without_form else b"")


copyreg.pickle(Ledger, _reduced)


def _compress(text: str) -> bytes:
    return zlib.compress(text.encode("utf-8", "surrogatepass"), 1)  # fast rather than small


def _expand(data: bytes) -> str:
    return zlib.decompress(data).decode("utf-8", "surrogatepass")


def _to_text(ledger: Ledger, objects: list[object] | None) -> str:
    sealed = reader_of(ledger)
    if sealed is not None and ledger.version > LEDGER_VERSION:
        text, pickled = sealed.args
        if pickled:
            check_version(ledger)  # the text alone would not be all of it
        return _expand(text)
    write = ValueWriter(FIELDS.writers, objects).write
    numbers = {_KEY: ledger.version, "next_id": ledger.next_id, "next_run": ledger.next_run}
    with collector_paused():
        records = [write(record) for record in ledger.records]
        return json.dumps({**numbers, "records": records}, separators=(",", ":"))


def _checked(what: str, read: Callable[[], T]) -> T:
    try:
        with collector_paused():
            return read()
    except (MalformedError, ValueError, RecursionError, zlib.error) as error:
        raise FxoptError(
            f"{what} cannot be read: {error}; expected what fxopt_core.ledger.codec wrote, so it was cut off or "
            "changed, or what has its kinds of edits is not installed here"
        ) from error


def _read_ledger(text: str, objects: list[object], names: Names = LOADED) -> Ledger:
    if '"journal":' in text:
        load_journals()
    read = ValueReader(FIELDS.readers, objects, names).read

    def early(data: dict[str, Any]) -> object:
        """Read each record as soon as its text is, so that JSON's objects do not pile up."""
        with suppress(FxoptError, ValueError):  # raised again below, unless a newer version has written it
            return read(data) if "Record" in data else data
        return data

    data = json.loads(text, object_hook=early)
    version = data.pop(_KEY, None) if isinstance(data, dict) else None
    if type(version) is not int or version < 1:
        raise MalformedError(f"found {text[:60]!r}, which has no version under {_KEY!r}")
    if version > LEDGER_VERSION:
        return restore_ledger(version, _compress(text), b"")
    ledger: Ledger = read({"Ledger": data})
    return ledger


@cache
def load_journals() -> None:
    """Import the modules that define journals and kinds of edits, which register them as `stored`."""
    for point in entry_points(group="fxopt_journal"):
        try:
            point.load()
        except Exception as error:  # of a stranger's code
            text = f"entry point {point.name!r} of the group fxopt_journal, {point.value}, failed to load: {error!r}"
            warnings.warn(f"{text}; records with its edits cannot be read", RuntimeWarning, stacklevel=2)
