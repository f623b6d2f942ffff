"""The functions that ledgers and key maps may name: exactly those that passes list as their ``arithmetic``.

A ledger may be untrusted, and loading a checkpoint calls the functions that it names. A name that is not on the list is
refused before anything is looked up. The arguments of the functions are data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fxopt_core import Derived, Transformation, is_plain_data, registry
from fxopt_rewrite.data.policies import find, is_identifier


def registered_functions() -> dict[str, Callable[..., Any]]:
    """Return the functions that passes list, by ``"module:name"``: installed plugins, and classes imported so far.

    >>> "os:system" in registered_functions()
    False
    """
    registry().available()  # imports the passes
    names = (f"{each.__module__}:{getattr(each, '__qualname__', '')}" for each in _listed(Transformation))
    found = {name: find(name) for name in names}
    return {name: function for name, function in found.items() if callable(function)}


def _listed(cls: type[Any]) -> Iterator[Callable[..., Any]]:
    yield from vars(cls).get("arithmetic", ())
    for each in type.__subclasses__(cls):
        yield from _listed(each)


def derived_problem(derived: Derived, functions: dict[str, Callable[..., Any]]) -> str | None:
    """Return what is wrong with a record of arithmetic, given the registered functions, or None."""
    for path in (derived.function, derived.restore):
        if path is not None and path not in functions:
            return unregistered(path)
    for name, value in derived.settings:
        if not is_identifier(name) or not is_plain_data(value):
            return f"gives `{derived.function}` a setting {name!r:.60} that is not a number, text or tuple of these"
    return None


def unregistered(path: str) -> str:
    """Return what is wrong with a name that is not on the list."""
    return (
        f"calls {path!r:.100}, which no pass that is installed or imported here lists as its `arithmetic`: install the "
        "package of the pass, or import it first"
    )
