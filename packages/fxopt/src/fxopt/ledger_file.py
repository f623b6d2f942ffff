"""The history in an archive, read without torch, which would take most of the time of `fxopt history`.

Only the ledger is read: nothing that it names is looked up, and neither weights nor the graph are touched. A file that
is not as `save` writes it is left to `load`, which says what is wrong.
"""

from __future__ import annotations

import json
import os
import stat
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_DOCUMENT, _LEDGER = "fxopt.json", "ledger.json"
_VERSION = 1  # of the ledger, and of what `History.to_json` writes
_MISSING = object()
# By the fields of each kind in a ledger: the key in a history, the type, and the default; None for what is left out.
_Fields = Mapping[str, tuple[str, type, object] | None]
_REWRITE: _Fields = {
    "site": ("site", str, _MISSING),
    "before": ("nodes_before", list, []),
    "after": ("nodes_after", list, []),
    "modules_before": ("modules_before", list, []),
    "modules_after": ("modules_after", list, []),
    "note": ("note", str, ""),
}
_REFUSAL: _Fields = {
    "site": ("site", str, _MISSING),
    "reason": ("reason", str, _MISSING),
    "message": ("message", str, _MISSING),
    "nodes": ("nodes", list, []),
}
_RECORD: _Fields = {
    "pass_name": ("pass", str, _MISSING),
    "transformation": ("class", str, _MISSING),
    "options": ("options", list, _MISSING),
    "signature": ("signature", str, _MISSING),
    "state": ("state", str, "applied"),
    "run": ("run", int, 0),
    "index": ("index", int, None),
    "reversible": ("reversible", bool, False),
    "changed": ("changed", bool, False),
    "seconds": ("seconds", float, 0.0),
    "rewrites": ("rewritten", list, []),
    "refusals": ("refused", list, []),
    **dict.fromkeys(("journal", "derived", "rekeyed")),
}
_UNLIKE_OURS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def read_history(path: Path) -> dict[str, Any] | None:
    """Return what `History.to_json` would write of an archive; None where `load` has to say what the file is."""
    try:
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(number, "rb") as file:
            status = os.fstat(number)
            if not stat.S_ISREG(status.st_mode):
                return None
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
                stored = all(each.compress_type == 0 and each.compress_size == each.file_size for each in entries)
                small = sum(each.file_size for each in entries) <= status.st_size
                distinct = len({each.filename.lower() for each in entries}) == len(entries)
                if not (stored and small and distinct and json.loads(archive.read(_DOCUMENT))["format"] == 1):
                    return None
                has_ledger = any(each.filename == _LEDGER for each in entries)
                passes = passes_of(archive.read(_LEDGER).decode()) if has_ledger else []
    except (*_UNLIKE_OURS, OSError, RuntimeError, NotImplementedError, zipfile.BadZipFile):
        return None
    return None if passes is None else {"history_version": _VERSION, "ledger_version": _VERSION, "passes": passes}


def passes_of(text: str) -> list[dict[str, Any]] | None:
    """Return the ``passes`` of `History.to_json` from the text of a ledger; None where it is not as `save` writes it.

    >>> passes_of('{"fxopt_ledger": 1, "next_id": 0, "next_run": 0, "records": []}')
    []
    """
    try:
        ledger = json.loads(text)
        if ledger["fxopt_ledger"] != _VERSION or not _is(int, ledger["next_id"]) or not _is(int, ledger["next_run"]):
            return None
        return [_pass(record) for record in ledger["records"]]
    except _UNLIKE_OURS:
        return None


def _pass(data: Any) -> dict[str, Any]:
    entry = _fields(data, "Record", _RECORD)
    if entry["state"] not in ("applied", "undone", "vetoed"):
        raise ValueError
    entry["options"] = {str(name): _option(value) for name, value in entry["options"]}
    entry["rewritten"] = [_fields(each, "Rewrite", _REWRITE) for each in entry["rewritten"]]
    entry["refused"] = [_fields(each, "Refusal", _REFUSAL) for each in entry["refused"]]
    return entry


def _fields(data: Any, kind: str, fields: _Fields) -> dict[str, Any]:
    """Return the fields of an instance as a history has them; other ones, and other types, are a `ValueError`."""
    given = data[kind]
    if not given.keys() <= fields.keys():
        raise ValueError
    found: dict[str, Any] = {}
    for name, field in fields.items():
        if field is not None:
            key, expected, default = field
            found[key] = value = given.get(name, default)
            if value is _MISSING or not (value is default or _is(expected, value)):
                raise ValueError
            if expected is list and kind != "Record" and not all(type(item) is str for item in value):
                raise ValueError
    return found


def _is(kind: type, value: Any) -> bool:
    if type(value) is int:
        return kind in (int, float) and -(2**63) <= value < 2**63
    return type(value) is kind


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
    "dtype": "torch.{}".format,
    "device": _device,
}
"""The forms of `fxopt_rewrite.data.forms` that an option may have; others are rare, and left to `load`."""
