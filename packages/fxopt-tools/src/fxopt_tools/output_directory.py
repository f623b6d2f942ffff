"""Directories that hold the files of one instrument and nothing else."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

from fxopt_core import PreconditionError

_LONGEST_NAME = 80
_LISTED = 5


def own_files(directory: Path, expected: str, is_own: Callable[[Path], bool]) -> list[Path]:
    """Return the files of a directory, which may be missing, in the order of their names.

    ``expected`` describes the directory in messages: "a new or empty directory for dumps".

    Raises:
        PreconditionError: It is a file, or holds other files.
    """
    if directory.is_file() or (directory.is_symlink() and not directory.is_dir()):
        raise PreconditionError(f"{directory} is a file, expected a directory ({expected}): give another path")
    found = sorted(directory.iterdir()) if directory.is_dir() else []
    others = [path.name for path in found if not is_own(path)]
    if others:
        listed = ", ".join(others[:_LISTED]) + (", ..." if len(others) > _LISTED else "")
        raise PreconditionError(f"{directory} holds other files ({listed}), expected {expected}: give another path")
    return found


def safe_name(name: str) -> str:
    """Return a name with all but letters, digits, dots, underscores and dashes replaced by dashes."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "replace").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", plain)[:_LONGEST_NAME] or "pass"
