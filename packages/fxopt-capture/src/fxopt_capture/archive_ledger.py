"""The ledger as an archive holds it: core's text, in which nothing is named but torch and passes that are there.

Undoing a pass puts nodes and modules back that the ledger names, and carrying a checkpoint over calls the functions
that a fold names. An archive may come from anyone, so that names of anything else are refused.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from torch import nn

from fxopt_core.errors import FxoptError
from fxopt_core.json_values import find
from fxopt_core.ledger import LEDGER_VERSION, Ledger
from fxopt_core.ledger_codec import ledger_from_json, ledger_to_json
from fxopt_core.ledger_rows import NodeAdded, NodeRemoved
from fxopt_core.transformation import Transformation

from .archive_table import is_archivable
from .archive_targets import target_name
from .archive_values import Json, Unarchivable

_OF_TYPES = frozenset({"builtins", "collections", "torch", "types", "typing"})


def write_ledger(ledger: Ledger) -> str:
    """Return a ledger as text.

    Raises:
        Unarchivable: it names something that an archive may not; the message says what.
    """
    try:
        text = ledger_to_json(ledger)
    except FxoptError as error:
        raise Unarchivable(f"the ledger cannot be written: {error}") from error
    if ledger.version > LEDGER_VERSION:
        return text
    data = _with_text_in_meta(json.loads(text))
    _check(data)
    _check_nodes(ledger)
    return json.dumps(data)


def read_ledger(text: str) -> Ledger:
    """Return the ledger of a text; opaque where a newer version of fxopt wrote it.

    Raises:
        FxoptError: it is no ledger.
        Unarchivable: it names something that an archive may not; the message says what.
    """
    ledger = ledger_from_json(text)
    if ledger.version <= LEDGER_VERSION:
        _check(json.loads(text))
        _check_nodes(ledger)
    return ledger


def _with_text_in_meta(data: Json, within: bool = False) -> Json:
    """Return the data with classes in the ``meta`` of nodes as text, as torch's own graphs have them."""
    if isinstance(data, list):
        return [_with_text_in_meta(item, within) for item in data]
    if not isinstance(data, dict):
        return data
    if within and data.keys() == {"name"} and isinstance(data["name"], str):
        return data["name"].replace(":", ".")
    return {key: _with_text_in_meta(item, within or key == "meta") for key, item in data.items()}


def _check(data: Json) -> None:
    """Check everything that a ledger names."""
    for record in data["records"]:
        _check_names(record, str(record["Record"]["transformation"]))


def _check_names(data: Json, transformation: str) -> None:
    if isinstance(data, list):
        for item in data:
            _check_names(item, transformation)
    if not isinstance(data, dict):
        return
    for kind, content in data.items():
        if kind == "name" and len(data) == 1:
            _demand(_is_plain(content), f"names {content!r}, which is no function or type of torch")
        elif kind in ("enum", "namedtuple") and len(data) == 1:
            _demand(_is_of_torch(content[0]), f"names {content[0]!r}, which is no class of torch")
        elif kind == "ModuleRow":
            _demand(_is_layer(content["cls"]), f"names {content['cls']!r}, which is no class of torch.nn")
        elif kind == "Derived":
            for key in ("function", "restore"):
                path = content.get(key)
                is_known = path is None or _is_of_pass(str(path), transformation)
                _demand(is_known, f"calls {path!r}, which belongs to no pass that is installed here")
        _check_names(content, transformation)


def _demand(holds: bool, complaint: str) -> None:
    if not holds:
        raise Unarchivable(f"the ledger {complaint}")


def _is_plain(name: object) -> bool:
    if not isinstance(name, str):
        return False
    found = find(name)
    return target_name(found) is not None or (
        _top(name) in _OF_TYPES and (isinstance(found, type) or "typing:" in name)
    )


def _is_of_torch(name: object) -> bool:
    return isinstance(name, str) and _top(name) == "torch"


def _is_layer(name: object) -> bool:
    found = find(name) if isinstance(name, str) and name.startswith("torch.nn.") else None
    return isinstance(found, type) and issubclass(found, nn.Module)


def _is_of_pass(path: str, transformation: str) -> bool:
    """Whether a function lives in the package of a pass that is installed, or known to this process."""
    top = _top(path)
    if top.startswith("fxopt_") or top in _families():
        return True
    known = find(transformation) if _top(transformation) in sys.modules else None
    return top == _top(transformation) and isinstance(known, type) and issubclass(known, Transformation)


def _top(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]


@cache
def _families() -> frozenset[str]:
    return frozenset(_top(point.value) for point in entry_points(group="fxopt"))


def _check_nodes(ledger: Ledger) -> None:
    """Check what undoing would put into the graph."""
    for record in ledger.records:
        for operation in record.operations or ():
            row: Any = operation.row if isinstance(operation, NodeAdded | NodeRemoved) else None
            if row is not None and not is_archivable(row.op, row.name, row.target):
                raise Unarchivable(
                    f"record `{record.pass_name}` has a node `{row.name}` that calls {row.target}, which is no "
                    f"function of torch"
                )
