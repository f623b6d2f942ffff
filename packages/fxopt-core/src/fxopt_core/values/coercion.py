"""Check the value of an option against its annotation, and fit it where a literal cannot say the very type.

Text knows no tuple of unknown length, no frozenset and no whole-numbered float, so that ``["a"]`` given for a
``tuple[str, ...]`` becomes ``("a",)`` and ``1`` given for a ``float`` becomes ``1.0``. Nothing else is converted: a
``bool`` is no ``int``, an ``int`` is no ``bool``, and a ``str`` is no sequence of strings. What an annotation does not
say (``Any``, a name that cannot be resolved, a protocol) is not checked.
"""

from __future__ import annotations

import collections.abc as abc
import types
import typing
from collections.abc import Iterable
from inspect import Parameter
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from fxopt_core.errors import PassOptionError

# What an annotation asks for, and what a list or tuple becomes where it may not stay what it is.
_SEQUENCES: dict[object, type | None] = {
    list: list,
    tuple: tuple,
    abc.MutableSequence: list,
    **dict.fromkeys((abc.Sequence, abc.Collection, abc.Iterable)),
}
_SETS: tuple[object, ...] = (set, frozenset, abc.Set, abc.MutableSet)
_MAPPINGS: tuple[object, ...] = (dict, abc.Mapping, abc.MutableMapping)
_LITERALS = (type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)


class _MismatchError(Exception):
    """A value does not fit an annotation."""


def coerce(value: object, annotation: object, *, pass_name: str = "", option: str = "") -> object:
    """Return a value as its annotation, which is resolved, wants it; the names are for the message.

    Raises:
        PassOptionError: the value does not fit.

    >>> coerce(["a", "b"], tuple[str, ...]), coerce(1, float), coerce(None, int | None)
    (('a', 'b'), 1.0, None)
    >>> coerce(True, int, pass_name="merge-linears", option="min-group")
    Traceback (most recent call last):
    fxopt_core.errors.PassOptionError: pass 'merge-linears', option 'min-group': found True (bool), expected int
    """
    try:
        return _fit(value, annotation, exact=False)
    except _MismatchError:
        where = ", ".join([f"pass {pass_name!r}"] * bool(pass_name) + [f"option {option!r}"] * bool(option))
        prefix = f"{where}: " if where else ""
        message = f"{prefix}found {show_value(value)}, expected {show_annotation(annotation)}"
        raise PassOptionError(message) from None


def show_annotation(annotation: object) -> str:
    """Return an annotation as a reader would write it.

    >>> show_annotation(tuple[str, ...]), show_annotation(int), show_annotation(int | None)
    ('tuple[str, ...]', 'int', 'int | None')
    """
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation.__qualname__
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")


def show_value(value: object) -> str:
    """Return a short text for a value and its type; only what a literal can say is shown in full.

    >>> show_value("3"), show_value(object())
    ("'3' (str)", 'a value of type object')
    """
    kind = type(value)
    if kind not in _LITERALS:
        return f"a value of type {kind.__qualname__}"
    try:
        text = repr(value)
    except Exception:  # an int of thousands of digits, an element whose repr fails
        return f"a value of type {kind.__qualname__}"
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return text if value is None else f"{text} ({kind.__qualname__})"


def _fit(value: object, annotation: object, *, exact: bool) -> object:
    """Return the value for the annotation; ``exact`` allows no conversion (how a union is read first)."""
    annotation = _plain(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    container: Any = annotation if origin is None else origin
    if origin in (Union, types.UnionType):
        return _fit_union(value, arguments, exact=exact)
    if origin is Literal:
        return _require(value, any(type(value) is type(choice) and value == choice for choice in arguments))
    if container in _SEQUENCES:
        return _fit_sequence(value, container, arguments, exact=exact)
    if container in _SETS:
        return _fit_set(value, container, arguments, exact=exact)
    if container in _MAPPINGS:
        return _fit_mapping(value, container, arguments, exact=exact)
    if container is abc.Callable:
        return _require(value, callable(value))
    if origin is type:
        bounds = tuple(bound for bound in arguments if isinstance(bound, type))
        return _require(value, isinstance(value, type) and all(issubclass(value, bound) for bound in bounds))
    if container in (int, float, complex):
        return _fit_number(value, container, exact=exact)
    says_something = isinstance(container, type) and container not in (Any, Parameter.empty)
    if not says_something or getattr(container, "_is_protocol", False):
        return value
    return _require(value, isinstance(value, container))


def _plain(annotation: object) -> object:
    """Peel ``Annotated``, ``NewType`` and type aliases; spell ``None`` as its type."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":  # since Python 3.12
            annotation = getattr(annotation, "__value__", Any)
        else:
            return type(None) if annotation is None else annotation


def _require(value: object, fits: bool) -> object:
    if not fits:
        raise _MismatchError
    return value


def _fit_union(value: object, members: tuple[object, ...], *, exact: bool) -> object:
    """Prefer a member that the value fits as it is: 1 stays an int for ``float | int``."""
    for as_it_is in (True,) if exact else (True, False):
        for member in members:
            try:
                return _fit(value, member, exact=as_it_is)
            except _MismatchError:
                continue
    raise _MismatchError


def _fit_number(value: object, cls: type, *, exact: bool) -> object:
    if isinstance(value, cls) and not isinstance(value, bool):
        return value
    if exact or cls is int or isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _MismatchError
    try:
        converted = float(value) if cls is float else complex(value)
    except OverflowError:
        raise _MismatchError from None
    return _require(converted, converted == value or value != value)


def _fit_sequence(value: object, kind: Any, items: tuple[object, ...], *, exact: bool) -> object:
    wanted = _SEQUENCES[kind]
    if not isinstance(value, (list, tuple)):  # an iterator is not read, a set has no order
        is_text = isinstance(value, (str, bytes, bytearray))
        return _require(value, wanted is None and isinstance(value, kind) and not is_text)
    if wanted is None:
        wanted = list if isinstance(value, list) else tuple
    _require(value, isinstance(value, wanted) or not exact)
    if kind is tuple and items and items[-1] is not Ellipsis:
        _require(value, len(items) == len(value))
    elif items:
        items = items[:1] * len(value)
    fitted = [_fit(entry, item, exact=exact) for entry, item in zip(value, items, strict=True)] if items else [*value]
    return _rebuilt(value, wanted, fitted, value)


def _fit_set(value: object, kind: Any, items: tuple[object, ...], *, exact: bool) -> object:
    if isinstance(value, kind) and isinstance(value, (set, frozenset)):
        wanted: type = frozenset if isinstance(value, frozenset) else set
    elif not exact and isinstance(value, (set, frozenset, list, tuple)):
        wanted = frozenset if kind is frozenset else set
    else:
        return _require(value, isinstance(value, kind))
    before = list(value)
    fitted = [_fit(entry, items[0], exact=exact) for entry in before] if items else before
    return _rebuilt(value, wanted, fitted, before)


def _fit_mapping(value: object, kind: Any, items: tuple[object, ...], *, exact: bool) -> object:
    _require(value, isinstance(value, kind))
    if not items or not isinstance(value, dict):
        return value
    fitted = {_fit(key, items[0], exact=exact): _fit(entry, items[1], exact=exact) for key, entry in value.items()}
    same_keys = all(new is old for new, old in zip(fitted, value, strict=True))
    return value if same_keys and all(fitted[key] is value[key] for key in fitted) else fitted


def _rebuilt(value: object, wanted: type, fitted: list[Any], before: Iterable[object]) -> object:
    """Return the very value where nothing changed, so that subclasses (a named tuple) stay what they are."""
    unchanged = all(new is old for new, old in zip(fitted, before, strict=True))
    if unchanged and isinstance(value, wanted):
        return value
    try:
        return wanted(fitted)
    except TypeError:  # an element that cannot be hashed
        raise _MismatchError from None
