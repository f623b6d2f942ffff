"""Digests that say whether two passes are the same: `signature_of` by options, `uuid_of` by code and version too."""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from collections.abc import Mapping

from fxopt_core.encoding import Encoder, UnstableValueError, class_name, pack, source_of

_FORMAT = "fxopt signature 1"


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
    return _digest(Encoder(), cls, options)


def uuid_of(cls: type, options: Mapping[str, object]) -> str:
    """Return a hex digest of class and options, as `signature_of`, and of code and version: a key for caches.

    The code is that of the class, of its bases, and of the passes, functions and classes among its options, as far as
    their source can be read.

    Raises:
        TypeError: an option has no stable value; the message names it.
    """
    bases = [base for base in cls.__mro__ if base.__module__ not in ("builtins", "abc")]
    code = [pack("code", class_name(base), source_of(base), _version_of(base)) for base in bases]
    return _digest(Encoder(with_code=True), cls, options, *code)


def same_value(left: object, right: object) -> bool:
    """Return whether two values count as one in a signature; those that have no stable encoding do only by identity.

    >>> same_value(1, 1.0), same_value({1, 2}, {2, 1}), same_value(float("nan"), float("nan"))
    (False, True, True)
    """
    if left is right:
        return True
    try:
        return Encoder().encode(left) == Encoder().encode(right)
    except (TypeError, RecursionError):
        return False


def _digest(encoder: Encoder, cls: type, options: Mapping[str, object], *further: bytes) -> str:
    parts = [pack("class", class_name(cls)), *further]
    parts += [pack("option", name, _encoded_option(encoder, cls, name, options[name])) for name in sorted(options)]
    return hashlib.sha256(pack(_FORMAT, *parts)).hexdigest()


def _encoded_option(encoder: Encoder, cls: type, name: str, value: object) -> bytes:
    where = f"option {name!r} of {cls.__qualname__} has no value that is the same in every process"
    try:
        return encoder.encode(value)
    except UnstableValueError as error:
        raise TypeError(f"{where}: {error}") from error.__cause__
    except RecursionError:
        raise TypeError(f"{where}: found a {type(value).__qualname__} nested too deeply; flatten it") from None


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
