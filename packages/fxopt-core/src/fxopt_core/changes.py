"""One marker for all changes of layers: code that prepared many layers compares it at each call, and not each layer.

The marker is an object. A layer whose state others rely on calls `changed` after a change of an attribute, of a tensor
in its dictionaries, or after handing out a weight that may be written from then on. So does a rollback. A reader that
has compared its layers one by one keeps the marker; while `latest_change` returns the same one, no layer has changed.
"""

from __future__ import annotations

_latest = object()


def changed() -> None:
    """Replace the marker; no thread ever sees an earlier one again.

    >>> before = latest_change()
    >>> changed()
    >>> latest_change() is before
    False
    """
    global _latest
    _latest = object()


def latest_change() -> object:
    """Return the marker, to be kept and compared with ``is``."""
    return _latest
