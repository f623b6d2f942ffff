"""Check the value of an option against its annotation, and fit it where text cannot say the very type.

Options are plain values: numbers, text, True, False, None, and lists and tuples of such. ``["a"]`` given for a
``tuple[str, ...]`` becomes ``("a",)``, and ``1`` given for a ``float`` becomes ``1.0``. Nothing else is converted: a
``bool`` is no ``int``, an ``int`` is no ``bool``, and a ``str`` is no sequence of strings. What an annotation does not
say (``Any``, a name that cannot be resolved) is not checked.
"""

from __future__ import annotations

import collections.abc as abc
import types
from contextlib import suppress
from operator import is_
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from fxopt_core.errors import PassOptionError

PLAIN = (type(None), bool, int, float, str)
# What an annotation asks for, and what a list or tuple becomes where it may not stay what it is.
_SEQUENCES: dict[object, type | None] = {
    list: list,
    tuple: tuple,
    **dict.fromkeys((abc.Sequence, abc.Collection, abc.Iterable)),
}


_MISFIT = object()


def is_plain(value: object) -> bool:
    """Return whether a value is one that an option may have: a number, text, a boolean, None, a list or tuple of such.

    >>> is_plain([1, ("a", None)]), is_plain({1})
    (True, False)
    """
    return all(map(is_plain, value)) if type(value) in (list, tuple) else type(value) in PLAIN  # type: ignore[call-overload]  # a list or tuple


def coerce(value: object, annotation: object, *, pass_name: str = "", option: str = "") -> object:
    """Return a value as its annotation, which is resolved, wants it; the names are for the message.

    Raises:
        PassOptionError: the value does not fit, or is of a kind that no option has.

    >>> coerce(["a", "b"], tuple[str, ...]), coerce(1, float), coerce(None, int | None)
    (('a', 'b'), 1.0, None)
    >>> coerce(True, int, pass_name="merge-linears", option="min-group")
    Traceback (most recent call last):
    fxopt_core.errors.PassOptionError: pass 'merge-linears', option 'min-group': found True (bool), expected int
    """
    expected = show_annotation(annotation)
    try:
        fitted = _fit(value, annotation) if is_plain(value) else _MISFIT
        if fitted is not _MISFIT:
            return fitted
        if not is_plain(value):
            expected = "a number, text, True, False, None, or a list or tuple of such"
    except RecursionError:
        pass
    where = ", ".join([f"pass {pass_name!r}"] * bool(pass_name) + [f"option {option!r}"] * bool(option))
    prefix = f"{where}: " if where else ""
    raise PassOptionError(f"{prefix}found {show_value(value)}, expected {expected}")


def show_annotation(annotation: object) -> str:
    """Return an annotation as a reader would write it.

    >>> show_annotation(tuple[str, ...]), show_annotation(int), show_annotation(int | None)
    ('tuple[str, ...]', 'int', 'int | None')
    """
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation.__qualname__
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")


def show_value(value: object) -> str:
    """Return a short text for a value and its type; only plain values are shown in full.

    >>> show_value("3"), show_value(object())
    ("'3' (str)", 'a value of type object')
    """
    try:
        text = repr(value) if is_plain(value) else ""
    except (ValueError, RecursionError):  # an int of thousands of digits; a list that contains itself
        text = ""
    if not text:
        return f"a value of type {type(value).__qualname__}"
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return text if value is None else f"{text} ({type(value).__qualname__})"


def _fit(value: Any, annotation: Any) -> object:
    """Return the value for the annotation: itself where it fits as it is, or `_MISFIT`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    wanted = origin or annotation
    if origin is Annotated:
        return _fit(value, arguments[0])
    if origin in (Union, types.UnionType):
        fitted = [each for each in (_fit(value, member) for member in arguments) if each is not _MISFIT]
        return next((each for each in fitted if each is value), fitted[0] if fitted else _MISFIT)  # 1 stays an int
    if wanted in _SEQUENCES:
        return _fit_sequence(value, wanted, arguments)
    if wanted is float and type(value) is int:
        with suppress(OverflowError):
            return float(value) if float(value) == value else _MISFIT
        return _MISFIT
    if origin is Literal:
        fits = any(type(value) is type(choice) and value == choice for choice in arguments)
    elif wanted is None or wanted in PLAIN:
        fits = type(value) is (wanted or type(None))
    else:
        fits = not isinstance(wanted, type) or wanted in (object, Any, abc.Callable) or wanted.__name__ == "_empty"
    return value if fits else _MISFIT


def _fit_sequence(value: Any, kind: Any, items: tuple[Any, ...]) -> object:
    fixed = kind is tuple and items and items[-1] is not Ellipsis
    if type(value) not in (list, tuple) or (fixed and len(items) != len(value)):
        return _MISFIT
    members = items if fixed else (items[:1] or (Any,)) * len(value)
    fitted = list(map(_fit, value, members))
    if any(each is _MISFIT for each in fitted):
        return _MISFIT
    wanted: Any = _SEQUENCES[kind] or type(value)
    return value if type(value) is wanted and all(map(is_, fitted, value)) else wanted(fitted)
