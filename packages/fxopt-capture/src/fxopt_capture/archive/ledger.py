"""The ledger of an archive as text, which may only name what torch has and installed plugins offer.

Undoing a pass restores nodes and modules that the ledger names, and loading a checkpoint calls the functions that a
fold names. An archive may be untrusted, so all other names are refused, on writing too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from fxopt_capture.archive.module_rows import layer_class, new_module
from fxopt_core import (
    Ledger,
    Record,
    name_of,
    operator_path,
)
from fxopt_core.errors import FxoptError
from fxopt_rewrite import (
    OPERATIONS,
    PLAIN,
    Form,
    InexpressibleError,
    Listed,
    MalformedError,
    ModuleRemoved,
    ModuleRow,
    Names,
    NodeAdded,
    NodeRemoved,
    TensorRemoved,
    UntrustedNameError,
    derived_problem,
    edits_of,
    find,
    is_identifier,
    is_plain_method,
    ledger_from_json,
    ledger_to_json,
    of_kind,
    plain_name,
    registered_functions,
    torch_class,
)

_OF_TYPES = frozenset({"builtins", "collections", "torch", "types"})
_UNSAFE = frozenset("\"'\\\n\r\0")


def write_ledger(ledger: Ledger) -> str:
    """Return a ledger as text, without source lines of its nodes.

    Raises:
        InexpressibleError: it names something that an archive may not; the message says what.
    """
    try:
        text = json.dumps(_with_plain_meta(json.loads(ledger_to_json(ledger))))
        read_ledger(text)
    except FxoptError as error:
        raise InexpressibleError(f"the ledger cannot be written: {error}") from error
    return text


def read_ledger(text: str) -> Ledger:
    """Return the ledger of a text.

    Raises:
        FxoptError: the text is not a ledger, or is one of a newer version.
        UntrustedNameError: it names something that an archive may not; the message says what.
    """
    ledger = ledger_from_json(text, _NAMES)
    functions = lru_cache(1)(registered_functions)  # asked for where a record has arithmetic
    for record in ledger.records:
        for complaint in _complaints(record, functions):
            raise UntrustedNameError(f"the ledger {complaint}")
    return ledger


def _with_plain_meta(data: Form, *, within: bool = False) -> Form:
    """Return data with classes in the ``meta`` of nodes as text, as torch's own graphs have them."""
    if isinstance(data, list):
        return [_with_plain_meta(item, within=within) for item in data]
    if not isinstance(data, dict):
        return data
    if within and data.keys() == {"name"} and isinstance(data["name"], str):
        return data["name"].replace(":", ".")
    found = {
        key: _with_plain_meta(item, within=within or key == "meta")
        for key, item in data.items()
        if key != "stack_trace"
    }
    return {key: item for key, item in found.items() if key != "meta" or item}  # as it is written when it is empty


def _plain_or_type(name: str) -> object:
    """Return the object that a value of the ledger names: a function of torch, or a type for an annotation."""
    found = find(name) if name.partition(":")[0].partition(".")[0] in _OF_TYPES else None
    return found if isinstance(found, type) else PLAIN.function(name)


_NAMES = Names(_plain_or_type, torch_class, name_of)


def _complaints(record: Record, functions: Callable[[], dict[str, Callable[..., Any]]]) -> Iterator[str]:
    """Yield complaints about names and values in a record that undo or loading must not look up, call or set."""
    edits = edits_of(record)
    tensors = of_kind(edits, TensorRemoved)
    modules = [edit.row for edit in of_kind(edits, ModuleRemoved)]
    for module in modules:
        if layer_class(module.cls) is None:
            yield f"names {module.cls!r}, which is neither a class of torch.nn nor a layer of a plugin"
        elif not _is_path(module.name) or not _has_state_of(module):
            yield f"has a module `{module.name}` with names or attributes that a {module.cls} does not have"
    for tensor in (*(edit.row for edit in tensors), *(row for module in modules for row in module.tensors)):
        if not _is_path(tensor.name):
            yield f"has a tensor `{tensor.name}` with a name that tensors do not have"
    added, removed = of_kind(edits, NodeAdded), of_kind(edits, NodeRemoved)
    for row in (*(edit.row for edit in added), *(edit.row for edit in removed)):
        is_node = row.op in OPERATIONS and _is_writable(row.op, row.name, row.target)
        if not is_node or not ((row.op.startswith("call_") and row.op != "call_module") or _is_path(row.target)):
            yield f"has a node `{row.name}` that calls {row.target}, which is not a function of torch"
        if not all(is_identifier(key) for key, _ in row.kwargs) or not all(map(_is_data, (row.args, row.kwargs))):
            yield f"has a node `{row.name}` with a function or a wrong name among its arguments"
        if row.target is getattr and not (len(row.args) > 1 and PLAIN.is_attribute(row.args[1])):
            yield f"has a node `{row.name}` that reads a private attribute"
    for derived in record.derived:
        # Only functions that a pass lists as its arithmetic, since a package has others that do more than compute.
        problem = derived_problem(derived, functions())
        if problem is not None:
            yield problem


def _is_path(name: str) -> bool:
    """Return whether a node may have this target, which becomes code between quotes."""
    return not _UNSAFE.intersection(name) and not any(part.startswith("__") for part in name.split("."))


def _is_data(value: object) -> bool:
    """Return whether a value consists of data, types and operators, without other functions."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(_is_data, value))
    if isinstance(value, dict):
        return all(map(_is_data, (*value, *value.values())))
    return not callable(value) or isinstance(value, type) or bool(operator_path(value))


def _has_state_of(row: ModuleRow) -> bool:
    """Return whether a module of the row's class may have its attributes and tensors."""
    attributes = [(key, list(v.items) if isinstance(v, Listed) else v) for key, v in row.attributes]
    cls = layer_class(row.cls)
    assert cls is not None  # which `_complaints` has asked first
    try:
        new_module(cls, [item for item in attributes if item[0] != "training"])
    except MalformedError:
        return False
    own = all(tensor.name.rpartition(".")[0] == row.name for tensor in row.tensors)
    return own and all(_is_data(value) for _, value in attributes)


def _is_writable(op: str, name: object, target: object) -> bool:
    """Return whether an untrusted file may hold a node of this operation, name and target."""
    if op == "call_function":
        return is_identifier(name) and plain_name(target) is not None
    return is_identifier(name) and isinstance(target, str) and (op != "call_method" or is_plain_method(target))
