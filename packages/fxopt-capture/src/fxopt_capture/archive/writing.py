"""Write an archive so that a file is either the whole new one, or what it was."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from io import BytesIO
from typing import IO, Any

import torch
from torch.export import ExportedProgram

from fxopt_capture.archive.container import PathLike
from fxopt_capture.export.failure import first_line
from fxopt_core.errors import CaptureError
from fxopt_core.naming import type_text
from fxopt_rewrite.special_files import special_kind


def checked_target(target: PathLike | IO[bytes]) -> str | IO[bytes]:
    """Return the path to write to, or the file that is open for it.

    Raises:
        CaptureError: nothing can be written there: its folder is not there, or it is one itself.
    """
    if not isinstance(target, str | bytes | os.PathLike):
        if not callable(getattr(target, "write", None)):
            raise CaptureError(f"{type_text(target)} is neither a path nor an open file to save to")
        return target
    path = os.fsdecode(target)
    folder, name = os.path.split(path)
    if folder and not os.path.isdir(folder):
        raise CaptureError(f"{path!r} cannot be written, as there is no folder {folder!r}; create it first")
    if not name or os.path.isdir(path):
        raise CaptureError(f"{path!r} cannot be written, as it names no file; give one, such as 'model.pt2'")
    if special_kind(path) is not None:
        raise CaptureError(f"{path!r} cannot be written, as it is {special_kind(path)}; give the path of a file")
    return path


def write_archive(program: ExportedProgram, target: str | IO[bytes], extra: Mapping[str, str]) -> None:
    """Write an archive: to an open file at once, or beside the file that it is to be, and then put in its place.

    Raises:
        CaptureError: torch cannot write the program, or the file cannot be written; what was there is unchanged.
    """
    name = target if isinstance(target, str) else str(getattr(target, "name", type_text(target)))
    try:
        if isinstance(target, str):
            _replace(program, os.path.realpath(target), extra)
        else:
            buffer = BytesIO()
            torch.export.save(program, buffer, extra_files=dict(extra))
            target.write(buffer.getvalue())
    except OSError as error:
        reason = error.strerror or str(error)
        raise CaptureError(f"{name!r} cannot be written: {reason}; whatever was there is unchanged") from error
    except Exception as error:  # whatever torch cannot serialize
        raise CaptureError(
            f"torch.export.save cannot write the program: {type(error).__name__}: {first_line(error)}. Containers of "
            f"inputs and outputs need a name there (torch.export.register_dataclass(..., serialized_type_name=...)); "
            f"whatever was at {name!r} is unchanged"
        ) from error


def _replace(program: ExportedProgram, path: str, extra: Mapping[str, str]) -> None:
    """Write a file beside the one at a path, and put it there; take it away if anything fails."""
    beside = f"{path}.{os.getpid()}.part"
    try:
        with open(beside, "wb") as file:
            buffer = _Unfailing(file)
            torch.export.save(program, buffer, extra_files=dict(extra))
            if buffer.error is not None:
                raise buffer.error
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        with contextlib.suppress(OSError):
            os.remove(beside)


class _Unfailing(BytesIO):
    """Writes to a file until that fails, and notes why.

    Where a write raises, torch ends the process: its writer goes on when it is destroyed, and may not fail then.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        """Write bytes, or do as if."""
        try:
            if self.error is None:
                self._file.write(data)
        except BaseException as error:  # an interrupt too
            self.error = error
        return len(data)
