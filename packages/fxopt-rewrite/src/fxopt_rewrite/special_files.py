"""Paths that are not regular files: reading a FIFO waits for a writer, and `/dev/zero` has no end."""

from __future__ import annotations

import os
import stat


def special_kind(path: str | bytes | os.PathLike[str] | os.PathLike[bytes] | int) -> str | None:
    """Return what a path or open file is, following links, if it exists and is not a regular file; else None.

    >>> special_kind(os.devnull), special_kind(os.curdir), special_kind("nowhere")
    ('a FIFO, socket or device', 'a directory', None)
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # opening it says why
        return None
    if stat.S_ISREG(mode):
        return None
    return "a directory" if stat.S_ISDIR(mode) else "a FIFO, socket or device"
