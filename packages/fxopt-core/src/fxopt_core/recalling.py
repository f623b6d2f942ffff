"""Recorded values brought back: nodes in place of their numbers, functions and classes in place of their names."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from fxopt_core.ledger_rows import Ref, Unresolved


def import_class(path: str) -> Any:
    """Return the class, function or operator with this ``"module:qualified.name"``.

    Raises:
        ImportError: There is no such module.
        AttributeError: The module has no such name.

    >>> import_class("math:sqrt")(4.0)
    2.0
    """
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def recall(value: Any, node_of: Callable[[Ref], Any]) -> Any:
    """Return a recorded value with ``node_of(reference)`` in place of references, and with all names imported.

    Raises:
        ImportError: A module of a name is not installed.
        AttributeError: A module has no such name.

    >>> recall((1, [Ref(2)], Unresolved("math:sqrt")), lambda ref: f"node {ref.id}")
    (1, ['node 2'], <built-in function sqrt>)
    """
    return mapped(value, node_of, _import)


def mapped(
    value: Any, node_of: Callable[[Ref], Any], named: Callable[[Unresolved], Any] = lambda unresolved: unresolved
) -> Any:
    """Return a recorded value with something else in place of references, and of names.

    >>> mapped({"a": (1, slice(Ref(2), None))}, lambda ref: Ref(ref.id + 1))
    {'a': (1, slice(Ref(id=3), None, None))}
    """
    if isinstance(value, Ref):
        return node_of(value)
    if isinstance(value, Unresolved):
        return named(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, node_of, named) for item in value))
    if type(value) is tuple:
        return tuple(mapped(item, node_of, named) for item in value)
    if isinstance(value, list):
        return [mapped(item, node_of, named) for item in value]
    if isinstance(value, dict):
        return {key: mapped(item, node_of, named) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(item, node_of, named) for item in (value.start, value.stop, value.step)))
    return value


def _import(value: Unresolved) -> Any:
    found = import_class(value.name)
    if value.form is None:
        return found
    from fxopt_core.json_values import ValueReader

    return ValueReader({}).read(json.loads(value.form))  # its class is loaded now


def recall_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded ``meta``; a class that is not to be had stands as text there, as in torch's export graphs.

    >>> recall_meta({"nn_module_stack": {"a": ("a", Unresolved("nowhere:Attention"))}})
    {'nn_module_stack': {'a': ('a', 'nowhere.Attention')}}
    """
    return {key: _with_text(value) for key, value in meta.items()}


def _with_text(value: Any) -> Any:
    if isinstance(value, Unresolved):
        try:
            return _import(value)
        except Exception:  # whatever importing somebody's module raises
            return value.name.replace(":", ".")
    if type(value) in (tuple, list):
        return type(value)(_with_text(item) for item in value)
    if isinstance(value, dict):
        return type(value)((key, _with_text(item)) for key, item in value.items())
    return value
