"""Forms of plain values, which JSON can hold, for signatures and for whoever writes values as data.

Text, whole numbers, booleans and None are themselves, and a tuple is an array. Everything else is an object whose one
key says what it is, ``{"dtype": "float32"}``: ``1``, ``1.0``, ``True`` and ``"1"`` differ, as do ``[1]``, ``(1,)``.
"""

from __future__ import annotations

import base64
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

Form = Any
Write = Callable[[Any], Form]
_PLAIN_DATA = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def is_plain_data(value: object) -> bool:
    """Return whether a value is immutable data that a record may hold."""
    if isinstance(value, tuple):
        return all(is_plain_data(item) for item in value)
    return isinstance(value, _PLAIN_DATA)


def form_text(form: Form) -> str:
    """Return the text of a form: equal forms have equal texts, different ones different texts."""
    return json.dumps(form, ensure_ascii=False, separators=(",", ":"))


def form_bytes(form: Form) -> bytes:
    """Return the bytes of a form, to take a digest of."""
    return form_text(form).encode("utf-8", "surrogatepass")


# -- forms that every writer shares


def _int_form(value: int, _: Write) -> Form:
    return value if -(2**63) <= value < 2**63 else {"int": format(value, "x")}  # Python refuses decimals of any length


def _text_form(key: str) -> Callable[[Any, Write], Form]:
    return lambda value, _: {key: str(value).removeprefix("torch.")}


def _many(key: str) -> Callable[[Any, Write], Form]:
    return lambda value, write: {key: [write(item) for item in value]}


def _sorted(key: str) -> Callable[[Any, Write], Form]:
    return lambda value, write: {key: sorted(map(write, value), key=form_text)}


def _pairs(key: str) -> Callable[[Any, Write], Form]:
    return lambda value, write: {key: [[write(name), write(item)] for name, item in value.items()]}


Forms = Mapping[type, Callable[[Any, Write], Form]]
FORMS: Forms = {
    int: _int_form,
    float: lambda value, _: value if value - value == 0 else {"float": repr(value)},
    complex: lambda value, _: {"complex": [repr(value.real), repr(value.imag)]},
    bytes: lambda value, _: {"bytes": base64.b64encode(value).decode()},
    type(Ellipsis): lambda value, _: {"ellipsis": None},
    list: _many("list"),
    set: _sorted("set"),
    frozenset: _sorted("frozenset"),
    dict: _pairs("dict"),
    OrderedDict: _pairs("ordered_dict"),
    slice: lambda value, write: {"slice": [write(value.start), write(value.stop), write(value.step)]},
    range: lambda value, _: {"range": [value.start, value.stop, value.step]},
    torch.Size: _many("size"),
    torch.dtype: _text_form("dtype"),
    torch.device: _text_form("device"),
    torch.layout: _text_form("layout"),
    torch.memory_format: _text_form("memory_format"),
}
