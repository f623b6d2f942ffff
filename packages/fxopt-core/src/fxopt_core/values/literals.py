"""Plain values as pipeline text has them: where one ends, what it says, and how it is written."""

from __future__ import annotations

import ast
import math
import re
import warnings

from fxopt_core.values.coercion import is_plain
from fxopt_core.values.names import class_path

_STRING = re.compile(r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'""", re.DOTALL)


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
    opened: list[int] = []
    at = start
    while at < len(text) and (opened or not (text[at] in ",}" or text[at].isspace())):
        if text[at] in "\"'":
            string = _STRING.match(text, at)
            if string is None:
                raise LiteralError(f"the quoted text is never closed; expected {text[at]}", at)
            at = string.end()
            continue
        if text[at] in "([":
            opened.append(at)
        elif text[at] in ")]" and (not opened or text[opened.pop()] + text[at] not in ("()", "[]")):
            raise LiteralError(f"found {text[at]!r}, and no such bracket is open", at)
        elif text[at] == "#":
            raise LiteralError("a value cannot hold a comment; remove the '#', or quote the text", at)
        at += 1
    if opened:
        raise LiteralError("the bracket is never closed", opened[-1])
    return at


def read_literal(text: str) -> object:
    """Return the plain value that a literal says.

    >>> read_literal('["a", -1, (None,)]')
    ['a', -1, (None,)]
    """
    try:
        with warnings.catch_warnings():
            # A regular expression is often written with a backslash that Python would keep, but warn about.
            warnings.simplefilter("ignore")
            value: object = ast.literal_eval(text)
        if is_plain(value):
            return value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    raise LiteralError(
        f'{shown!r} is no value of an option; give a number, quoted text ("..."), True, False, None, or a list or '
        "tuple of such"
    )


def literal_text(value: object) -> str:
    """Return the canonical literal of a plain value; text is in double quotes, as far as that needs no escapes.

    >>> literal_text(["a", (float("inf"), -1)])
    '["a", (1e999, -1)]'
    """
    try:
        if not is_plain(value) or value != value:
            what = "nan" if type(value) is float else f"a {class_path(type(value))}"
            raise LiteralError(f"text cannot express {what}")
        if isinstance(value, (list, tuple)):
            items = ", ".join(map(literal_text, value))
            return f"[{items}]" if isinstance(value, list) else f"({items},)" if len(value) == 1 else f"({items})"
        if isinstance(value, float) and math.isinf(value):
            return "1e999" if value > 0 else "-1e999"
        text = repr(value)
    except (ValueError, RecursionError):  # an int of thousands of digits; a list that contains itself
        raise LiteralError(f"text cannot express this {type(value).__qualname__}: too long or too deep") from None
    return f'"{text[1:-1]}"' if text[0] == "'" and '"' not in text else text
