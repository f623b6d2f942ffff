"""One number for all changes: what is made of many layers asks for it at each call, instead of for each of them.

The number is an object. A layer that others prepare for calls `changed` after anything about it has changed: an
attribute, a tensor in its dictionaries, a weight that was given out and may be written from then on. So does a
rollback. Whoever has compared its layers one by one keeps the number of before; while it is the same, so are they.
"""

from __future__ import annotations

_latest = object()


def changed() -> None:
    """Give the number another value: no thread ever sees one of before again.

    >>> before = latest_change()
    >>> changed()
    >>> latest_change() is before
    False
    """
    global _latest
    _latest = object()


def latest_change() -> object:
    """Return the number, to be compared with ``is``: while it is kept, no other object is it."""
    return _latest
