"""A typed encoding of values: equal values give equal bytes in every process, different ones different bytes.

Every value is written as its kind, then each part of its content preceded by the part's length, so that ``1``,
``1.0``, ``True`` and ``"1"`` differ, as do ``[1]`` and ``(1,)``. Dictionaries and sets are written in the order of
their entries' encodings, whatever order they were filled in. Nothing depends on addresses or on hashes of strings.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import inspect
import pathlib
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, Flag
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

if TYPE_CHECKING:
    from fxopt_core.transformation import Transformation

_BUILTINS: tuple[type, ...] = (int, float, complex, str, bytes, tuple, list, OrderedDict, dict, set, frozenset)


class UnstableValueError(TypeError):
    """A value has no encoding that is the same in every process."""


class Encoder:
    """Writes values.

    Args:
        with_code: whether the source of functions, classes and passes counts, and not their names alone.
    """

    def __init__(self, *, with_code: bool = False) -> None:
        self._with_code = with_code
        self._open: set[int] = set()  # the containers being written, to notice one that contains itself

    def encode(self, value: object) -> bytes:
        """Return the encoding of a value.

        Raises:
            UnstableValueError: it has none; the message says what was found and what to give instead.

        >>> Encoder().encode(1) == Encoder().encode(True)
        False
        >>> Encoder().encode({"a": 1, "b": 2}) == Encoder().encode({"b": 2, "a": 1})
        True
        """
        writer = _WRITERS.get(type(value))
        if writer is None:
            return self._encode_other(value)
        return writer(self, value)

    def _encode_other(self, value: object) -> bytes:
        """Write what an exact type does not decide."""
        if isinstance(value, Enum):
            return self._encode_enum(value)
        if isinstance(value, Tensor):
            raise _tensor_error(value, f"a tensor subclass, {class_name(type(value))}", "a plain tensor")
        if _is_pass(value):
            return pack("pass", value.uuid() if self._with_code else value.signature)
        if isinstance(value, type) or isinstance(getattr(value, "__qualname__", None), str):
            return self._encode_named(value)
        if isinstance(value, pathlib.PurePath):
            return _encode_path(value)
        if dataclasses.is_dataclass(value):
            return self._encode_dataclass(value)
        return self._encode_subclass(value)

    def _encode_enum(self, value: Enum) -> bytes:
        # Combined flags have no name of their own, and their value is a number.
        content = self.encode(value.value) if isinstance(value, Flag) else value.name.encode("utf-8", "surrogatepass")
        return pack("enum", class_name(type(value)), content)

    def _encode_named(self, value: Any) -> bytes:
        name = importable_name(value)
        if name is None:
            raise UnstableValueError(
                f"found {value.__qualname__!r} of type {class_name(type(value))}, which cannot be imported by name; "
                "define it with `def` or `class` at the top level of a module"
            )
        return pack("name", name, source_of(value) if self._with_code else "")

    def _encode_dataclass(self, value: Any) -> bytes:
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.compare}
        return pack("dataclass", class_name(type(value)), self._entries("fields", value, fields.items()))

    def _encode_subclass(self, value: Any) -> bytes:
        """Write an instance of a subclass of a built-in type: as its own type, with its own attributes."""
        for base in _BUILTINS:
            if isinstance(value, base):
                content = _WRITERS[base](self, value)
                extra = self._entries("attributes", value, getattr(value, "__dict__", {}).items())
                return pack("subclass", class_name(type(value)), content, extra)
        raise UnstableValueError(
            f"found an object of type {class_name(type(value))}; give a number, text, a list or dictionary of such, "
            "a tensor, a function of a module, or an instance of a dataclass"
        )

    def _encode_partial(self, value: functools.partial[object]) -> bytes:
        return pack("partial", *(self.encode(part) for part in (value.func, value.args, value.keywords)))

    def _items(self, kind: str, value: Iterable[object], *, ordered: bool = True) -> bytes:
        with self._entered(value):
            parts = [self.encode(item) for item in value]
        return pack(kind, *(parts if ordered else sorted(parts)))

    def _entries(
        self, kind: str, owner: object, entries: Iterable[tuple[object, object]], *, ordered: bool = False
    ) -> bytes:
        with self._entered(owner):
            parts = [pack("entry", self.encode(key), self.encode(item)) for key, item in entries]
        return pack(kind, *(parts if ordered else sorted(parts)))

    @contextmanager
    def _entered(self, value: object) -> Iterator[None]:
        if id(value) in self._open:
            raise UnstableValueError(f"found a {type(value).__qualname__} that contains itself; break the cycle")
        self._open.add(id(value))
        try:
            yield
        finally:
            self._open.discard(id(value))


def pack(kind: str, *parts: bytes | str) -> bytes:
    """Return one entry: each part is preceded by its length, so that no two sequences of parts run together.

    >>> pack("s", "ab", "c"), pack("s", "a", "bc")
    (b'1:s2:ab1:c', b'1:s1:a2:bc')
    """
    encoded = [part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass") for part in (kind, *parts)]
    return b"".join(b"%d:%b" % (len(part), part) for part in encoded)


def class_name(cls: type) -> str:
    """Return the module and the qualified name of a class."""
    return f"{cls.__module__}:{cls.__qualname__}"


def importable_name(value: Any) -> str | None:
    """Return a name under which this very object can be imported, or None.

    >>> importable_name(torch.nn.Linear), importable_name(torch.ops.aten.add.Tensor), importable_name(lambda: None)
    ('torch.nn.modules.linear:Linear', 'torch:ops.aten.add.Tensor', None)
    """
    for module, qualified_name in _candidate_names(value):
        found: object = sys.modules.get(module)
        for part in qualified_name.split("."):
            try:
                found = getattr(found, part, None)
            except Exception:  # a module or class that computes its attributes
                found = None
        if found is value or (isinstance(value, types.MethodType) and found == value):
            return f"{module}:{qualified_name}"
    return None


def source_of(value: Any) -> str:
    """Return the source code of a function or class, or an empty text where it cannot be read."""
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):  # built in, or typed in
        return ""


def _candidate_names(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, (OpOverload, OpOverloadPacket)):
        yield "torch", f"ops.{value}"
        return
    name = getattr(value, "__name__", None)
    # Methods of C types name their class, class methods are bound to it; other functions name their module.
    owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
    if isinstance(owner, type):
        yield owner.__module__, f"{owner.__qualname__}.{name}"
    module = getattr(value, "__module__", None)
    if isinstance(module, str):
        yield module, value.__qualname__
        yield module, str(name)


def _is_pass(value: object) -> TypeGuard[Transformation]:
    from fxopt_core.transformation import Transformation  # it imports this module

    return isinstance(value, Transformation)


def _encode_path(value: pathlib.PurePath) -> bytes:
    # The classes moved between modules and Python versions; their names did not.
    return pack("path", type(value).__name__, str(value))


def _encode_range(value: range) -> bytes:
    """Write a range as it compares: by its elements."""
    return pack("range", str(len(value)), str(value.start) * (len(value) > 0), str(value.step) * (len(value) > 1))


def _encode_tensor(value: Tensor) -> bytes:
    """Write a dense tensor by dtype, shape and contents, wherever it lives and however it is laid out."""
    if value.is_meta:
        raise _tensor_error(value, "a meta tensor, which has no values", "a tensor with values, on the CPU say")
    if value.layout is not torch.strided or value.is_nested:
        raise _tensor_error(value, f"a tensor of layout {value.layout}", "a dense one (`.to_dense()`)")
    if value.is_quantized:
        raise _tensor_error(value, "a quantized tensor", "a dense one (`.dequantize()`)")
    dense = value.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    if type(dense) is not Tensor:
        raise _tensor_error(value, f"a tensor read as {class_name(type(dense))}", "it outside of any tensor mode")
    kind = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
    return pack(kind, str(value.dtype), str(tuple(value.shape)), _content_digest(dense))


def _content_digest(dense: Tensor) -> bytes:
    size = dense.numel() * dense.element_size()
    if size == 0:
        return b""
    try:
        address = dense.data_ptr()
    except RuntimeError as error:
        raise _tensor_error(dense, "a tensor without memory of its own", "a plain tensor") from error
    return hashlib.sha256((ctypes.c_char * size).from_address(address)).digest()


def _tensor_error(value: Tensor, found: str, wanted: str) -> UnstableValueError:
    return UnstableValueError(f"found {found} (shape {tuple(value.shape)}, {value.dtype}); give {wanted}")


def _by_text(kind: str) -> Callable[[Encoder, Any], bytes]:
    return lambda encoder, value: pack(kind, str(value))


_WRITERS: dict[type, Callable[[Encoder, Any], bytes]] = {
    type(None): _by_text("none"),
    type(Ellipsis): _by_text("ellipsis"),
    bool: _by_text("bool"),
    # By the methods of the built-in type, whatever a subclass makes of them.
    int: lambda encoder, value: pack("int", int.__format__(value, "x")),
    float: lambda encoder, value: pack("float", float.hex(value)),
    complex: lambda encoder, value: pack("complex", float.hex(value.real), float.hex(value.imag)),
    str: lambda encoder, value: pack("str", value),
    bytes: lambda encoder, value: pack("bytes", value),
    list: lambda encoder, value: encoder._items("list", value),
    tuple: lambda encoder, value: encoder._items("tuple", value),
    set: lambda encoder, value: encoder._items("set", value, ordered=False),
    frozenset: lambda encoder, value: encoder._items("frozenset", value, ordered=False),
    dict: lambda encoder, value: encoder._entries("dict", value, dict.items(value)),
    OrderedDict: lambda encoder, value: encoder._entries("ordered dict", value, value.items(), ordered=True),
    types.MappingProxyType: lambda encoder, value: encoder._entries("mapping proxy", value, value.items()),
    slice: lambda encoder, value: pack("slice", *map(encoder.encode, (value.start, value.stop, value.step))),
    range: lambda encoder, value: _encode_range(value),
    re.Pattern: lambda encoder, value: pack("pattern", encoder.encode(value.pattern), str(value.flags)),
    functools.partial: Encoder._encode_partial,
    torch.dtype: _by_text("dtype"),
    torch.device: _by_text("device"),
    torch.layout: _by_text("layout"),
    torch.memory_format: _by_text("memory format"),
    Tensor: lambda encoder, value: _encode_tensor(value),
    torch.nn.Parameter: lambda encoder, value: _encode_tensor(value),
}
