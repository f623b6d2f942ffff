"""The ledger as JSON text, and back: for archives of graph modules, and for journals in pickles.

The text is an object: ``{"fxopt_ledger": version, "next_id": ..., "next_run": ..., "records": [...]}``. Records, and
the edits in their journals, are written by `fxopt_rewrite.data.forms.Fields`. Reading imports nothing.
"""

from __future__ import annotations

import json
import pickle
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from fxopt_core import (
    LEDGER_VERSION,
    Derived,
    Journal,
    Ledger,
    NodeTag,
    Record,
    Refusal,
    Rewrite,
    collector_paused,
)
from fxopt_core.errors import FxoptError
from fxopt_rewrite.data.forms import Fields, MalformedError, ValueReader, ValueWriter
from fxopt_rewrite.data.policies import LOADED, Names

_KEY = "fxopt_ledger"
FIELDS = Fields((Ledger, Record, Refusal, Rewrite, Derived, NodeTag))
#: A decorator: lets instances of a dataclass be part of a ledger's text, under the name of the class.
#:
#: Journals and kinds of edits are such classes. The module that defines one is an entry point of the group
#: ``fxopt_journal``, which is loaded when a ledger with a journal is read.
stored = FIELDS.add


@contextmanager
def _checked(what: str) -> Iterator[None]:
    try:
        with collector_paused():
            yield
    except (MalformedError, ValueError, RecursionError, zlib.error) as error:
        raise FxoptError(
            f"{what} cannot be read: {error}; expected what fxopt_rewrite.data.codec wrote, so it was cut off or "
            "changed, or the package with its kinds of edits is not installed here"
        ) from error


def ledger_to_json(ledger: Ledger) -> str:
    """Write a ledger as text.

    Raises:
        FxoptError: JSON cannot express a value in it; the message names the value and its node, module or pass. Such
            values in a node's ``meta`` are left out instead.

    >>> ledger_to_json(Ledger())
    '{"fxopt_ledger":1,"next_id":0,"next_run":0,"records":[]}'
    >>> ledger_from_json(ledger_to_json(Ledger())) == Ledger()
    True
    """
    write = ValueWriter(FIELDS.writers).write
    numbers = {_KEY: LEDGER_VERSION, "next_id": ledger.next_id, "next_run": ledger.next_run}
    with collector_paused():
        records = [write(record) for record in ledger.records]
        return json.dumps({**numbers, "records": records}, separators=(",", ":"))


@_checked("this ledger")
def ledger_from_json(text: str, names: Names = LOADED) -> Ledger:
    """Read a ledger that `ledger_to_json` has written; ``names`` is the policy for names in its values.

    Raises:
        FxoptError: The text is not a ledger, or one of a newer version; the message says where, and what was found.
    """
    if '"journal":' in text:
        load_journals()
    data = json.loads(text)
    version = data.pop(_KEY, None) if isinstance(data, dict) else None
    if type(version) is not int or version < 1:
        raise MalformedError(f"found {text[:60]!r}, which has no version under {_KEY!r}")
    if version > LEDGER_VERSION:
        raise FxoptError(
            f"the ledger of this graph module was written by version {version} of its format, and this fxopt reads "
            f"versions up to {LEDGER_VERSION}: install a newer fxopt-core; nothing was changed"
        )
    ledger: Ledger = ValueReader(FIELDS.readers, (), names).read({"Ledger": data})
    return ledger


def tag_to_json(tag: NodeTag) -> dict[str, Any]:
    """Return the tag of a node as plain JSON data.

    >>> tag_to_json(NodeTag(3, ("a1b2",), ("merge-linears", ("q", "k"))))
    {'id': 3, 'marks': ['a1b2'], 'origin': ['merge-linears', ['q', 'k']]}
    """
    return dict(ValueWriter(FIELDS.writers).write(tag)["NodeTag"])


@_checked("what fxopt knows of a node")
def tag_from_json(data: object) -> NodeTag:
    """Read what `tag_to_json` has written.

    >>> tag_from_json({"marks": ["a1b2"]})
    NodeTag(id=None, marks=('a1b2',), origin=None, name=None)
    """
    tag: NodeTag = ValueReader(FIELDS.readers).read({"NodeTag": data})
    return tag


def pack(journal: Journal) -> tuple[bytes, bytes]:
    """Return a journal as compressed text, and a pickle of the values that JSON cannot express."""
    objects: list[object] = []
    with collector_paused():
        text = json.dumps(ValueWriter(FIELDS.writers, objects).write(journal), separators=(",", ":"))
    packed = zlib.compress(text.encode("utf-8", "surrogatepass"), 1)  # fast rather than small
    return packed, pickle.dumps(objects) if objects else b""


@_checked("the journal of this pickle")
def restore_journal(text: bytes, objects: bytes) -> Journal:
    """Return what `pack` was given. Pickles name this function, so it must keep its name and parameters."""
    load_journals()
    values = pickle.loads(objects) if objects else []
    data = json.loads(zlib.decompress(text).decode("utf-8", "surrogatepass"))
    journal: Journal = ValueReader(FIELDS.readers, values).read(data)
    return journal


@cache
def load_journals() -> None:
    """Import the modules that define journals and kinds of edits, which register them as `stored`."""
    # A group of its own: with a hook of plugins, reading a pickle would import every family.
    for point in entry_points(group="fxopt_journal"):
        try:
            point.load()
        except Exception as error:  # third-party code
            text = f"entry point {point.name!r} of the group fxopt_journal, {point.value}, failed to load: {error!r}"
            warnings.warn(f"{text}; records with its edits cannot be read", RuntimeWarning, stacklevel=2)
