"""Checks that the functions of a pass's arithmetic accept the arguments that they will be called with."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import FunctionType

from fxopt_core import Derived
from fxopt_rewrite.data.policies import find


def check_arguments(derived: Derived) -> None:
    """Check names of arguments before they are recorded; results are checked when a checkpoint needs them.

    A function whose module is not loaded is not checked.

    Raises:
        ValueError: A name occurs twice, or a function does not take it.
    """
    given = [name for name, _ in (*derived.inputs, *derived.settings)]
    twice = next((name for name in given if given.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"`{derived.function}` is to be given `{twice}` twice: names of inputs and settings differ")
    _check(derived.function, (), given)
    if derived.restore is not None:
        settings = [name for name, _ in derived.settings]
        _check(derived.restore, derived.outputs, [*settings, "shapes"])


def _check(path: str, positional: Sequence[object], names: Sequence[str]) -> None:
    function = find(path)
    if not isinstance(function, FunctionType):
        return
    try:
        inspect.signature(function).bind(*positional, **dict.fromkeys(names))
    except TypeError as error:
        how = [f"{len(positional)} tensors by position"] * bool(positional) + [f"{name}=" for name in names]
        raise ValueError(f"`{path}` cannot be called with {', '.join(how)} ({error}): let it take these") from None
