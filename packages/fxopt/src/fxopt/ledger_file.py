"""The history in an archive, read without torch, which would take most of the time of `fxopt history`.

Only the ledger is read: nothing that it names is looked up, and neither weights nor the program are touched. A file
that is not as `save` writes it is left to `load`, which says what is wrong.
"""

from __future__ import annotations

import gc
import json
import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

_ENTRY = "extra/fxopt.json"
_FORMAT = 2  # of the document
_VERSION = 1  # of the ledger, and of what `History.to_json` writes
_HEAD = re.compile(r'\{"fxopt_ledger": ?(\d{1,9}), ?"next_id": ?\d{1,20}, ?"next_run": ?\d{1,20}, ?"records": ?\[')
_COMMA, _END = re.compile(", ?(?={)"), re.compile(r"\]\}\Z")
_OF_REWRITES = frozenset({"site", "before", "after", "modules_before", "modules_after", "note"})
_OF_REFUSALS = frozenset({"site", "reason", "message", "nodes"})
_OF_RECORDS = frozenset(
    {"pass_name", "transformation", "options", "signature", "rewrites", "refusals", "seconds", "state", "run", "index"}
    | {"reversible", "changed", "journal", "derived", "rekeyed", "note"}
)


class _UnlikeOurs(Exception):
    """Something is not as `save` writes it."""


_MALFORMED = (_UnlikeOurs, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def read_history(path: Path) -> dict[str, Any] | None:
    """Return what `History.to_json` would write of an archive; None where `load` has to say what the file is."""
    was_running = gc.isenabled()
    gc.disable()  # many objects are made, and nearly all of them stay
    try:
        document = json.loads(_entry(path).decode())
        text = document["ledger"]
        if not 1 <= _typed(int, document["format"]) <= _FORMAT:
            return None
        del document
        passes = [] if text is None else passes_of(_typed(str, text))
    except (*_MALFORMED, OSError, zipfile.BadZipFile):
        return None
    finally:
        if was_running:
            gc.enable()
    return None if passes is None else {"history_version": _VERSION, "ledger_version": _VERSION, "passes": passes}


def passes_of(text: str) -> list[dict[str, Any]] | None:
    """Return the ``passes`` of `History.to_json` from the text of a ledger; None where it is not as `save` writes it.

    >>> passes_of('{"fxopt_ledger": 1, "next_id": 0, "next_run": 0, "records": []}')
    []
    """
    try:
        return [_entry_of(record) for record in _records(text)]
    except _MALFORMED:
        return None


def _entry(path: Path) -> bytes:
    """Return the document beside the program: the one entry of its name, which is neither compressed nor cut off."""
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise _UnlikeOurs
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            names = {entry.filename.lower() for entry in entries}
            root = entries[0].filename.partition("/")[0] if entries else ""
            if len(names) != len(entries) or min(entry.header_offset for entry in entries):
                raise _UnlikeOurs
            archive.getinfo(f"{root}/models/model.json")
            info = archive.getinfo(f"{root}/{_ENTRY}")
            is_stored = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
            if not is_stored or info.compress_size != info.file_size or info.file_size > os.fstat(number).st_size:
                raise _UnlikeOurs
            return archive.read(info)


def _records(text: str) -> Iterator[Mapping[str, Any]]:
    """Yield the records of a ledger, one at a time: their journals are most of the text, and are not kept."""
    head = _HEAD.match(text)
    if head is None or int(head[1]) != _VERSION:
        raise _UnlikeOurs
    read, place = json.JSONDecoder().raw_decode, head.end()
    while not _END.match(text, place):
        record, place = read(text, place)
        yield _fields(record, "Record", _OF_RECORDS)
        comma = _COMMA.match(text, place)
        place = comma.end() if comma else place
        if not comma and not _END.match(text, place):
            raise _UnlikeOurs


def _entry_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of the ledger's text as `History.to_json` has it."""
    state, index = record.get("state", "applied"), record.get("index")
    if state not in ("applied", "undone", "vetoed"):
        raise _UnlikeOurs
    seconds = record.get("seconds", 0.0)
    _typed(int if type(seconds) is int else float, seconds)
    return {
        "pass": _typed(str, record["pass_name"]),
        "class": _typed(str, record["transformation"]),
        "options": {_typed(str, name): _option(value) for name, value in record["options"]},
        "signature": _typed(str, record["signature"]),
        "state": state,
        "run": _typed(int, record.get("run", 0)),
        "index": None if index is None else _typed(int, index),
        "reversible": _typed(bool, record.get("reversible", False)),
        "changed": _typed(bool, record.get("changed", False)),
        "seconds": seconds,
        "note": _typed(str, record.get("note", "")),
        "rewritten": [*map(_rewrite, record.get("rewrites", ()))],
        "refused": [*map(_refusal, record.get("refusals", ()))],
    }


def _rewrite(data: Any) -> dict[str, Any]:
    item = _fields(data, "Rewrite", _OF_REWRITES)
    return {
        "site": _typed(str, item["site"]),
        "nodes_before": _names(item.get("before", [])),
        "nodes_after": _names(item.get("after", [])),
        "modules_before": _names(item.get("modules_before", [])),
        "modules_after": _names(item.get("modules_after", [])),
        "note": _typed(str, item.get("note", "")),
    }


def _refusal(data: Any) -> dict[str, Any]:
    item = _fields(data, "Refusal", _OF_REFUSALS)
    texts = {key: _typed(str, item[key]) for key in ("site", "reason", "message")}
    return {**texts, "nodes": _names(item.get("nodes", []))}


def _fields(data: Any, kind: str, known: frozenset[str]) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = _typed(dict, data[kind])
    if not fields.keys() <= known:
        raise _UnlikeOurs
    return fields


def _typed(kind: type, value: Any) -> Any:
    if type(value) is not kind or (isinstance(value, int) and not -(2**63) <= value < 2**63):
        raise _UnlikeOurs
    return value


def _names(items: Any) -> list[str]:
    if not all(type(item) is str for item in _typed(list, items)):
        raise _UnlikeOurs
    return items  # type: ignore[no-any-return]  # checked in the line above


def _option(form: Any) -> Any:
    """Return an option as JSON has it; values that JSON lacks are their text."""
    if isinstance(form, list):
        return [_option(item) for item in form]
    if not isinstance(form, dict):
        return form
    ((kind, content),) = form.items()
    return _TEXTS[kind](content)


def _device(text: str) -> str:
    kind, _, index = text.partition(":")
    return f"device(type={kind!r}, index={int(index)})" if index else f"device(type={kind!r})"


_TEXTS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text if len(text) < 3500 else "", 16),
    "float": lambda text: repr(float(text)),
    "dtype": lambda text: f"torch.{_typed(str, text)}",
    "device": _device,
}
"""The forms of `fxopt_core.values.forms` that an option may have; others are rare, and left to it."""
