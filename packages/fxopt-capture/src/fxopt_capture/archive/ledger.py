"""The ledger of an archive: core's text, which may name nothing but torch and installed passes.

Undoing a pass puts nodes and modules back that the ledger names, and loading a checkpoint calls the functions that a
fold names. An archive may come from anyone, so that all other names are refused, on writing too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points

from fxopt_core.errors import FxoptError
from fxopt_core.ledger.codec import ledger_from_json, ledger_to_json
from fxopt_core.ledger.records import LEDGER_VERSION, Ledger, Record
from fxopt_core.passes.transformation import Transformation
from fxopt_core.values.forms import Form, InexpressibleError
from fxopt_core.values.names import Names, find, name_of
from fxopt_rewrite.journal.edits import ModuleRemoved, NodeAdded, NodeRemoved, TensorRemoved, of_kind
from fxopt_rewrite.journal.journal import edits_of
from fxopt_rewrite.plain_names import PLAIN, UntrustedNameError, is_writable, layer_classes, torch_class

_OF_TYPES = frozenset({"builtins", "collections", "torch", "types", "typing"})


def write_ledger(ledger: Ledger) -> str:
    """Return a ledger as text; one of a newer version of fxopt as it is.

    Raises:
        InexpressibleError: it names something that an archive may not; the message says what.
    """
    try:
        text = ledger_to_json(ledger)
        if ledger.version <= LEDGER_VERSION:
            text = json.dumps(_with_text_in_meta(json.loads(text)))
            read_ledger(text)
    except FxoptError as error:
        raise InexpressibleError(f"the ledger cannot be written: {error}") from error
    return text


def read_ledger(text: str) -> Ledger:
    """Return the ledger of a text; opaque where a newer version of fxopt wrote it.

    Raises:
        FxoptError: it is no ledger.
        UntrustedNameError: it names something that an archive may not; the message says what.
    """
    ledger = ledger_from_json(text, _NAMES)
    for record in ledger.records if ledger.version <= LEDGER_VERSION else ():
        for complaint in _complaints(record):
            raise UntrustedNameError(f"the ledger {complaint}")
    return ledger


def _with_text_in_meta(data: Form, within: bool = False) -> Form:
    """Return the data with classes in the ``meta`` of nodes as text, as torch's own graphs have them."""
    if isinstance(data, list):
        return [_with_text_in_meta(item, within) for item in data]
    if not isinstance(data, dict):
        return data
    if within and data.keys() == {"name"} and isinstance(data["name"], str):
        return data["name"].replace(":", ".")
    return {key: _with_text_in_meta(item, within or key == "meta") for key, item in data.items()}


def _plain_or_type(name: str) -> object:
    """Return what a value of the ledger names: a function of torch, or a type as annotations have them."""
    found = find(name)
    is_type = _top(name) in _OF_TYPES and (isinstance(found, type) or "typing:" in name)
    return found if is_type else PLAIN.function(name)


_NAMES = Names(_plain_or_type, torch_class, name_of)


def _complaints(record: Record) -> Iterator[str]:
    """Yield what a record names that undoing it, or loading a checkpoint, must not look up."""
    edits = edits_of(record)
    modules = [edit.row for edit in of_kind(edits, ModuleRemoved)]
    owners = [edit.owner for edit in of_kind(edits, TensorRemoved)]
    for module in (*modules, *owners):
        if module is not None and module.cls not in layer_classes():
            yield f"names {module.cls!r}, which is no class of torch.nn"
    added, removed = of_kind(edits, NodeAdded), of_kind(edits, NodeRemoved)
    for row in (*(edit.row for edit in added), *(edit.row for edit in removed)):
        if not is_writable(row.op, row.name, row.target):
            yield f"has a node `{row.name}` that calls {row.target}, which is no function of torch"
    for derived in record.derived:
        for path in (derived.function, derived.restore):
            if path is not None and not _is_of_pass(path, record.transformation):
                yield f"calls {path!r}, which belongs to no pass that is installed here"


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
