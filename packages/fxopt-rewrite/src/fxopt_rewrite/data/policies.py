"""Policies: which functions, classes and methods data may name, and how they are found."""

from __future__ import annotations

import keyword
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

from fxopt_core import name_of


@dataclass(frozen=True)
class Unresolved:
    """A name whose module is not loaded, kept until it is needed, or a value of such a class as JSON text."""

    name: str
    form: str | None = None


def find(name: str) -> Any:
    """Return the object with this name if its module is loaded, else an `Unresolved`; nothing is imported.

    >>> find("math:sqrt"), find("nowhere:function")
    (<built-in function sqrt>, Unresolved(name='nowhere:function', form=None))
    """
    module, _, path = name.partition(":")
    try:
        return reduce(getattr, path.split("."), sys.modules.get(module))
    except Exception:  # whatever computing the attribute raises
        return Unresolved(name)


def is_identifier(name: object) -> bool:
    """Return whether generated code can use a name."""
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


class Names(NamedTuple):
    """A policy: what data may name, and how it is found."""

    function: Callable[[str], Any]  # from a name to a function, a class or an operator
    cls: Callable[[str], Any]  # from a name to the class of a value
    name: Callable[[Any], str | None]  # None where data may not name it
    is_method: Callable[[object], bool] = is_identifier  # whether a node may call the method of this name
    is_attribute: Callable[[object], bool] = is_identifier  # whether a node may read the attribute of this name


LOADED = Names(find, find, name_of)  # data of our own, where nothing is to be imported: the rest is `Unresolved`
