"""Digests that say whether two passes are the same: `signature_of` by options, `uuid_of` by code and version too."""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from collections.abc import Mapping

from fxopt_core.naming import type_text
from fxopt_core.values.forms import Digester, Form, UnstableValueError, form_bytes
from fxopt_core.values.names import class_path, source_of

_FORMAT = "fxopt signature 2"


def signature_of(cls: type, options: Mapping[str, object]) -> str:
    """Return a hex digest of a class (by module and qualified name) and its options (by type and value).

    It is the same in every process, whatever order the options are in, and reading it changes nothing.

    An option may hold None, numbers, text, bytes, enum members, lists, tuples, dictionaries, sets, slices, ranges,
    paths, compiled patterns, dataclasses, torch's dtypes, devices, layouts, memory formats and sizes, dense tensors and
    parameters (by value), functions, classes and operators that can be imported (by name), `functools.partial` of them,
    and other passes.

    Raises:
        TypeError: an option holds something else: a lambda, a meta or sparse tensor; the message names the option.

    >>> signature_of(dict, {"a": 1, "b": 2}) == signature_of(dict, {"b": 2, "a": 1})
    True
    >>> len({signature_of(dict, {"a": value}) for value in (1, 1.0, True, "1")})
    4
    """
    return _digest(Digester(), cls, options)


def uuid_of(cls: type, options: Mapping[str, object]) -> str:
    """Return a hex digest of class and options, as `signature_of`, and of code and version: a key for caches.

    The code is that of the class, of its bases, and of the passes, functions and classes among its options, as far as
    their source can be read.

    Raises:
        TypeError: an option has no stable value; the message names it.
    """
    bases = [base for base in cls.__mro__ if base.__module__ not in ("builtins", "abc")]
    code = [[class_path(base), source_of(base), _version_of(base)] for base in bases]
    return _digest(Digester(with_code=True), cls, options, code)


def same_value(left: object, right: object) -> bool:
    """Return whether two values count as one in a signature; those without a stable form do only by identity.

    >>> same_value(1, 1.0), same_value({1, 2}, {2, 1}), same_value(float("nan"), float("nan"))
    (False, True, True)
    """
    if left is right:
        return True
    try:
        return form_bytes(Digester().write(left)) == form_bytes(Digester().write(right))
    except (TypeError, RecursionError):
        return False


def _digest(digester: Digester, cls: type, options: Mapping[str, object], code: Form = None) -> str:
    forms = {name: _option_form(digester, cls, name, options[name]) for name in sorted(options)}
    return hashlib.sha256(form_bytes([_FORMAT, class_path(cls), forms, code])).hexdigest()


def _option_form(digester: Digester, cls: type, name: str, value: object) -> Form:
    where = f"option {name!r} of {cls.__qualname__} has no value that is the same in every process"
    try:
        return digester.write(value)
    except UnstableValueError as error:
        raise TypeError(f"{where}: {error}") from error.__cause__
    except RecursionError:
        raise TypeError(f"{where}: found {type_text(value)} nested too deeply; flatten it") from None


def _version_of(cls: type) -> str:
    """Return the version of the distribution that a class comes from, or an empty text where it has none."""
    package = cls.__module__.partition(".")[0]
    version = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(version, str):
        return version
    try:
        return importlib.metadata.version(package.replace("_", "-"))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""
