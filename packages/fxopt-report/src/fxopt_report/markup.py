"""HTML as strings that are escaped once, when they are joined."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable
from typing import Any

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff"  # controls and halves of characters
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"  # what turns the direction of letters
)
_VOID = frozenset({"meta", "input", "br", "circle", "line", "path", "rect", "polygon"})


class Html(str):
    """Text that is HTML already; any other text is escaped."""

    __slots__ = ()


Content = str | Iterable[Any] | None


def tag(name: str, /, *content: Content, **attributes: object) -> Html:
    """Return an element.

    Args:
        name: its name.
        content: what is in it: text, which is escaped, elements, or iterables of these; None for nothing.
        attributes: its attributes; ``class_`` is ``class``, other underscores are hyphens. None and False leave one
            out, and True is one without a value.

    >>> tag("p", "a < b", tag("b", "!"), class_="x", hidden=True)
    '<p class="x" hidden>a &lt; b<b>!</b></p>'
    """
    shown = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Html(f"<{name}{shown}>" if name in ("meta", "input", "br") else f"<{name}{shown}/>")
    return Html(f"<{name}{shown}>{joined(content)}</{name}>")


def joined(content: Content) -> Html:
    """Return content as HTML."""
    if content is None:
        return Html("")
    if isinstance(content, Html):
        return content
    if isinstance(content, str):
        return Html(html.escape(printable(content), quote=False))
    return Html("".join(map(joined, content)))


def printable(text: str) -> str:
    r"""Return text without characters that HTML cannot hold or that reverse the order of letters.

    >>> printable("a\x00b\u202ec")
    'a\ufffdb\ufffdc'
    """
    return _UNPRINTABLE.sub("\ufffd", text)


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = "class" if key == "class_" else key.replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(printable(str(value)))}"'


def hash_source(text: str) -> str:
    """Return the hash by which a content security policy allows this script or style."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
