"""Check the value of an option against its annotation, and fit it where text cannot say the very type.

Options are plain values: numbers, text, True, False, None, and lists and tuples of such. ``["a"]`` given for a
``tuple[str, ...]`` becomes ``("a",)``, and ``1`` given for a ``float`` becomes ``1.0``. Nothing else is converted: a
``bool`` is no ``int``, an ``int`` is no ``bool``, and a ``str`` is no sequence of strings. What an annotation does not
say (``Any``, a name that cannot be resolved) is not checked.
"""

from __future__ import annotations

import collections.abc as abc
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from fxopt_core.errors import PassOptionError

PLAIN = (type(None), bool, int, float, str)
# What an annotation asks for, and what a list or tuple becomes where it may not stay what it is.
_SEQUENCES: dict[object, type | None] = {
    list: list,
    tuple: tuple,
    **dict.fromkeys((abc.Sequence, abc.Collection, abc.Iterable)),
}


class _MismatchError(Exception):
    """A value does not fit an annotation."""


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
        if is_plain(value):
            return _fit(value, annotation, exact=False)
        expected = "a number, text, True, False, None, or a list or tuple of such"
    except (_MismatchError, RecursionError):
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


def _fit(value: Any, annotation: Any, *, exact: bool) -> object:
    """Return the value for the annotation; ``exact`` allows no conversion (how a union is read first)."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _fit(value, arguments[0], exact=exact)
    wanted = origin or annotation
    if origin in (Union, types.UnionType):
        for as_it_is in (True,) if exact else (True, False):  # 1 stays an int for `float | int`
            for member in arguments:
                try:
                    return _fit(value, member, exact=as_it_is)
                except _MismatchError:
                    continue
        raise _MismatchError
    if origin is Literal:
        fits = any(type(value) is type(choice) and value == choice for choice in arguments)
    elif wanted in _SEQUENCES:
        return _fit_sequence(value, wanted, arguments, exact=exact)
    elif wanted is float and type(value) is int and not exact:
        try:
            value, whole = float(value), value
        except OverflowError:
            raise _MismatchError from None
        fits = value == whole
    elif wanted is None or wanted in PLAIN:
        fits = type(value) is (wanted or type(None))
    else:
        fits = not isinstance(wanted, type) or wanted in (object, Any, abc.Callable) or wanted.__name__ == "_empty"
    if not fits:
        raise _MismatchError
    return value


def _fit_sequence(value: Any, kind: Any, items: tuple[Any, ...], *, exact: bool) -> object:
    wanted: Any = _SEQUENCES[kind] or type(value)
    if type(value) not in (list, tuple) or (exact and type(value) is not wanted):
        raise _MismatchError
    if kind is tuple and items and items[-1] is not Ellipsis:
        if len(items) != len(value):
            raise _MismatchError
    elif items:
        items = items[:1] * len(value)
    fitted = [_fit(entry, item, exact=exact) for entry, item in zip(value, items, strict=True)] if items else [*value]
    same = type(value) is wanted and all(new is old for new, old in zip(fitted, value, strict=True))
    return value if same else wanted(fitted)
