"""Whether the file that a command is to write may be written: asked before the work begins, and without torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

from fxopt.commands.failures import FileError


def check_output(text: str, *, force: bool, suffix: str = ".pt2") -> Path:
    """Return the path of the file that is to be written, once it is clear that it may be.

    Where a file is there already, the user is asked; without a terminal to ask in, that is an error.

    Raises:
        FileError: It has another suffix, its folder is not there, or it exists and is to stay.
    """
    path = Path(text)
    if path.suffix != suffix:
        raise FileError(f"the output {text!r} does not end in {suffix!r}, which is what is written")
    if path.is_dir() or not path.parent.is_dir():
        found = "is a folder" if path.is_dir() else f"cannot be written: there is no folder {str(path.parent)!r}"
        raise FileError(f"the output {text!r} {found}; give the path of a file")
    if not os.access(path.parent, os.W_OK):
        raise FileError(f"the output {text!r} cannot be written: the folder {str(path.parent)!r} is read-only")
    if path.exists() and not force:
        _ask(path)
    return path


def _ask(path: Path) -> None:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise FileError(f"the output {str(path)!r} exists; give another path, or --force to replace it")
    try:
        replace = typer.confirm(f"{path} exists. Replace it?", err=True)
    except typer.Abort:
        raise KeyboardInterrupt from None
    if not replace:
        raise FileError(f"{str(path)!r} stays as it is, and nothing was done")


def size_text(count: int) -> str:
    """Return a number of bytes for readers.

    >>> size_text(512), size_text(90_870_598)
    ('512 bytes', '90.9 MB')
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"
