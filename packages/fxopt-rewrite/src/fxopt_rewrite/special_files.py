"""Paths that are not regular files: reading a FIFO waits for a writer, and `/dev/zero` has no end."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping

_KINDS: Mapping[Callable[[int], bool], str] = {
    stat.S_ISREG: "",
    stat.S_ISDIR: "a directory",
    stat.S_ISFIFO: "a FIFO",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}


def special_kind(path: str | bytes | os.PathLike[str] | os.PathLike[bytes] | int) -> str | None:
    """Return what a path or open file is, following links, if it exists and is not a regular file; else None.

    >>> special_kind(os.devnull), special_kind(os.curdir), special_kind("nowhere")
    ('a device', 'a directory', None)
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # opening it says why
        return None
    return next((kind for is_kind, kind in _KINDS.items() if is_kind(mode)), "a special file") or None
