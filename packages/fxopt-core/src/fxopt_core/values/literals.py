"""Python literals as pipeline text has them: where one ends, what it says, and how a value is written."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable
from typing import Any

from fxopt_core.values.names import class_path

_CLOSING = {"(": ")", "[": "]", "{": "}"}


class LiteralError(Exception):
    """Text is no literal, or a value has none; ``column`` is the place in the text, counted from 0."""

    def __init__(self, message: str, column: int = 0) -> None:
        super().__init__(message)
        self.column = column


def literal_end(text: str, start: int) -> int:
    """Return where the literal that begins at ``start`` ends: at a space, comma or closing brace outside of it.

    >>> text = 'where="a, b} c" n=1}'
    >>> text[6 : literal_end(text, 6)]
    '"a, b} c"'
    """
    expected: list[tuple[str, int]] = []
    at = start
    while at < len(text):
        char = text[at]
        if not expected and (char in ",}" or char.isspace()):
            return at
        if char in "\"'":
            at = _string_end(text, at)
            continue
        if char in _CLOSING:
            expected.append((_CLOSING[char], at))
        elif char in ")]}":
            wanted = expected.pop()[0] if expected else None
            if char != wanted:
                closes = f"expected {wanted!r}" if wanted else "no bracket is open"
                raise LiteralError(f"found {char!r}, {closes}", at)
        elif char == "#":
            raise LiteralError("a value cannot hold a comment; remove the '#', or quote the text", at)
        at += 1
    if expected:
        raise LiteralError(f"the bracket is never closed; expected {expected[-1][0]!r}", expected[-1][1])
    return at


def read_literal(text: str) -> object:
    """Return the value of a literal.

    >>> read_literal('["a", -1, {"b": None}]')
    ['a', -1, {'b': None}]
    """
    try:
        with warnings.catch_warnings():
            # A regular expression is often written with a backslash that Python would keep, but warn about.
            warnings.simplefilter("ignore")
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        raise LiteralError(
            f'{shown!r} is no Python literal; give a number, quoted text ("..."), True, False, None, or a list, '
            "tuple, set or dictionary of such"
        ) from None


def literal_text(value: object) -> str:
    """Return the canonical literal of a value; text is in double quotes, as far as that needs no escapes.

    >>> literal_text({"where": ("a", float("inf")), "n": -1})
    '{"n": -1, "where": ("a", 1e999)}'
    """
    writer = _WRITERS.get(type(value))
    if writer is None:
        raise LiteralError(f"text cannot express a value of type {class_path(type(value))}")
    try:
        return writer(value)
    except (ValueError, RecursionError):  # an int of thousands of digits; a list that contains itself
        raise LiteralError(f"text cannot express this {type(value).__qualname__}: too long or too deep") from None


def _string_end(text: str, start: int) -> int:
    quote = text[start]
    if text.startswith(quote * 3, start):
        quote *= 3
    at = start + len(quote)
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text.startswith(quote, at):
            return at + len(quote)
        else:
            at += 1
    raise LiteralError(f"the quoted text is never closed; expected {quote}", start)


def _float_text(value: float) -> str:
    if math.isnan(value):
        raise LiteralError("text cannot express nan")
    if math.isinf(value):
        return "1e999" if value > 0 else "-1e999"
    return repr(value)


def _complex_text(value: complex) -> str:
    if not (math.isfinite(value.real) and math.isfinite(value.imag)):
        raise LiteralError("text cannot express a complex number that is not finite")
    return repr(value)


def _quoted(value: str) -> str:
    text = repr(value)
    return f'"{text[1:-1]}"' if text[0] == "'" and '"' not in value else text


def _tuple_text(value: tuple[object, ...]) -> str:
    items = ", ".join(map(literal_text, value))
    return f"({items},)" if len(value) == 1 else f"({items})"


def _set_text(value: set[object] | frozenset[object]) -> str:
    return f"{{{', '.join(sorted(map(literal_text, value)))}}}" if value else "set()"


def _dict_text(value: dict[object, object]) -> str:
    return f"{{{', '.join(sorted(f'{literal_text(key)}: {literal_text(item)}' for key, item in value.items()))}}}"


_WRITERS: dict[type, Callable[[Any], str]] = {
    **dict.fromkeys((type(None), bool, int, bytes), repr),
    type(Ellipsis): lambda value: "...",
    float: _float_text,
    complex: _complex_text,
    str: _quoted,
    list: lambda value: f"[{', '.join(map(literal_text, value))}]",
    tuple: _tuple_text,
    **dict.fromkeys((set, frozenset), _set_text),  # the annotation makes a frozenset of it again
    dict: _dict_text,
}
