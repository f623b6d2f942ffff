"""For which reasons a pass may leave a site alone, read from its code."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

from fxopt_core import REASONS, SitePass, Transformation


def reasons_of(cls: type[Transformation]) -> frozenset[str]:
    """Return the codes of `fxopt_core.REASONS` that occur in a pass and in the functions that it can reach by name.

    It may never give one of them, and codes that it computes are not among them. Passes that are no `SitePass` record
    no refusals of their own, and have none.

    >>> from fxopt import ChangeTrueDivToMulByInverse
    >>> "rounded-quotient" in reasons_of(ChangeTrueDivToMulByInverse)
    True
    """
    if not issubclass(cls, SitePass):
        return frozenset()
    found = {"overlapping"}  # what core itself refuses for
    waiting = [function for base in _own_bases(cls) for function in _functions(base)]
    seen: set[FunctionType] = set()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if not isinstance(function, FunctionType) or function in seen or not _is_of_a_pass(function):
            continue
        seen.add(function)
        for code in _codes(function.__code__):
            found |= {constant for constant in _constants(code) if constant in REASONS}
            for name in code.co_names:
                waiting += _reached(function.__globals__.get(name))
    return frozenset(found)


def _own_bases(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if not base.__module__.startswith(("fxopt_core.", "typing", "builtins"))]


def _is_of_a_pass(function: FunctionType) -> bool:
    """Whether a function may say why a site is refused; those of torch and Python do not."""
    return not str(function.__module__).startswith(("torch", "typing", "dataclasses"))


def _reached(value: object) -> list[FunctionType]:
    if isinstance(value, type):
        return _functions(value) if value.__module__.partition(".")[0] not in ("torch", "builtins", "typing") else []
    return [value] if isinstance(value, FunctionType) else []


def _functions(cls: type) -> list[FunctionType]:
    members = [getattr(member, "__func__", getattr(member, "fget", member)) for member in vars(cls).values()]
    return [member for member in members if isinstance(member, FunctionType)]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of those inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _constants(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        for item in constant if isinstance(constant, tuple | frozenset) else (constant,):
            if isinstance(item, str):
                yield item
