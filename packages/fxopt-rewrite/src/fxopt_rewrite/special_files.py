"""Paths that are not regular files: reading a FIFO waits for a writer, and `/dev/zero` has no end."""

from __future__ import annotations

import os
import stat

#: By the letters with which ``ls -l`` begins its lines.
_KINDS = {"-": None, "d": "a directory", "p": "a FIFO", "s": "a socket", "c": "a device", "b": "a device"}


def special_kind(path: str | bytes | os.PathLike[str] | os.PathLike[bytes] | int) -> str | None:
    """Return what a path or open file is, following links, if it exists and is not a regular file; else None.

    >>> special_kind(os.devnull), special_kind(os.curdir), special_kind("nowhere")
    ('a device', 'a directory', None)
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # opening it says why
        return None
    return _KINDS.get(stat.filemode(mode)[0], "a special file")
