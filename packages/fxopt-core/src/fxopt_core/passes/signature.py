"""Digests that say whether two passes are the same: `signature_of` by options, `uuid_of` by code and version too."""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxopt_core.names import class_path, name_of, source_of

# Part of every digest: another text changes all signatures, so that marks and records made before are not recognised.
_FORMAT = "fxopt signature 3"
_BY_TEXT = frozenset(
    {float, complex, bytes, range, type(...), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_text = partial(json.dumps, ensure_ascii=False)  # with escapes, two halves of a character would be one


def signature_of(cls: type, options: Mapping[str, object]) -> str:
    """Return a hex digest of a class (by module and qualified name) and its options (by type and value).

    It is the same in every process, whatever order the options are in.

    An option may hold None, numbers, text, bytes, lists, tuples, dictionaries, sets, torch's dtypes, devices, layouts,
    memory formats and sizes, dense tensors and parameters (by value), functions, classes and operators that can be
    imported (by name), and other passes.

    Raises:
        TypeError: an option holds something else: a lambda, a meta or sparse tensor; the message names the option.

    >>> signature_of(dict, {"a": 1, "b": 2}) == signature_of(dict, {"b": 2, "a": 1})
    True
    >>> len({signature_of(dict, {"a": value}) for value in (1, 1.0, True, "1")})
    4
    """
    return _digest(cls, options, None)


def uuid_of(cls: type, options: Mapping[str, object]) -> str:
    """Return a hex digest of class and options, as `signature_of`, and of code and version: a key for caches.

    The code is that of the class, of its bases, and of the passes, functions and classes among its options, as far as
    their source can be read; the version is ``__version__`` of the package.

    Raises:
        TypeError: an option has no stable value; the message names it.
    """
    packages = {base: sys.modules.get(base.__module__.partition(".")[0]) for base in cls.__mro__}
    versions = {base: str(getattr(package, "__version__", "")) for base, package in packages.items()}
    return _digest(cls, options, [[class_path(base), source_of(base), versions[base]] for base in versions])


def same_value(left: object, right: object) -> bool:
    """Return whether two values are equal in a signature; a value without a stable form equals only itself.

    >>> same_value(1, 1.0), same_value({1, 2}, {2, 1}), same_value(float("nan"), float("nan"))
    (False, True, True)
    """
    if left is right:
        return True
    try:
        return _text(_form(left, False)) == _text(_form(right, False))
    except (TypeError, RecursionError):
        return False


def _digest(cls: type, options: Mapping[str, object], code: object) -> str:
    forms: dict[str, object] = {}
    for name in sorted(options):
        try:
            forms[name] = _form(options[name], code is not None)
        except (TypeError, RecursionError) as error:  # nested too deep, or in itself
            where = f"option {name!r} of {cls.__qualname__}"
            raise TypeError(f"{where} has no value that is the same in every process: {error}") from error.__cause__
    return hashlib.sha256(_text([_FORMAT, class_path(cls), forms, code]).encode("utf-8", "surrogatepass")).hexdigest()


def _form(value: Any, with_code: bool) -> Any:
    """Return a value as JSON: equal in every process for equal values, and different for values of different types."""
    cls, write = type(value), partial(_form, with_code=with_code)
    if cls in (str, bool, type(None)):
        return value
    if cls is int:
        return {"int": hex(value)}  # Python refuses decimals of any length
    if cls in _BY_TEXT:
        return {cls.__name__: repr(value)}
    if cls in (list, tuple, torch.Size):
        return {cls.__name__: list(map(write, value))}
    if cls in (set, frozenset):
        return {cls.__name__: sorted(map(write, value), key=_text)}
    if cls is dict:
        return {"dict": sorted(([write(key), write(item)] for key, item in value.items()), key=_text)}
    if isinstance(value, Tensor):
        return _tensor_form(value)
    if isinstance(value, type) or isinstance(getattr(value, "__qualname__", None), str):
        name = name_of(value)
        if name is None:
            found = f"found {value.__qualname__!r} of type {class_path(cls)}, which cannot be imported by name"
            raise TypeError(f"{found}; define it with `def` or `class` at the top level of a module")
        return {"name": [name, source_of(value)] if with_code else name}
    if hasattr(cls, "signature") and hasattr(cls, "uuid"):  # a pass, which is defined further up
        return {"pass": value.uuid() if with_code else value.signature}
    wanted = "a number, text, a list or dictionary of such, a tensor, or a function of a module"
    raise TypeError(f"found an object of type {class_path(cls)}; give {wanted}")


def _tensor_form(value: Tensor) -> Any:
    """Return dtype, shape and a digest of the contents of a dense tensor, whatever its device and strides."""
    dense, address = value, None
    is_plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
    if is_plain and not (value.is_meta or value.is_nested or value.is_quantized):
        dense = value.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        with suppress(RuntimeError):  # it has no memory of its own inside of torch.func
            address = dense.data_ptr() if type(dense) is Tensor else None
    if address is None:
        found = f"found a {class_path(type(value))} of {value.dtype}, {value.layout}, on {value.device}"
        raise TypeError(f"{found}, whose values cannot be read; give a dense tensor with values, on the CPU")
    # The bytes of a tensor of any dtype, without NumPy, which core does not require.
    content = ctypes.string_at(address, dense.numel() * dense.element_size())
    kind = "parameter" if isinstance(value, nn.Parameter) else "tensor"
    return {kind: [str(value.dtype), list(value.shape), hashlib.sha256(content).hexdigest()]}
