"""A fresh archive with what torch may read of a file: entries of an exact list, each once, and no more than it holds.

torch's reader takes another copy of an entry than `zipfile` where there are two, and ignores case, so that what was
checked would not be what is read. Nothing is compressed in archives of torch, so that no entry can grow.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from fxopt_core.errors import CaptureError
from fxopt_core.naming import type_text
from fxopt_rewrite.special_files import special_kind

ADVICE = "give a file that torch.export.save or fxopt_capture.save has written"
PathLike = str | bytes | os.PathLike[str] | os.PathLike[bytes]
_LARGE = 1 << 31


@contextmanager
def opened(source: PathLike | IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    """Open a file for reading bytes at any place of it; yield its name for messages, too.

    Raises:
        CaptureError: it is not there, or no ordinary file.
    """
    if isinstance(source, str | bytes | os.PathLike):
        path = os.fsdecode(source)
        with _opened_path(path) as file:
            yield path, file
        return
    if not callable(getattr(source, "read", None)):
        raise CaptureError(f"{type_text(source)} is neither a path nor an open file; {ADVICE}")
    name = str(getattr(source, "name", type_text(source)))
    if isinstance(source, io.FileIO | io.BufferedReader) and special_kind(source.fileno()) == "a device":
        raise CaptureError(f"{name!r} is a device, and no file; {ADVICE}")
    content: object = source.read()
    if not isinstance(content, bytes):
        raise CaptureError(f"{name!r} is open for reading text; open it for reading bytes: open(path, 'rb')")
    yield name, io.BytesIO(content)


def _opened_path(path: str) -> IO[bytes]:
    kind = special_kind(path)  # opening a socket says less
    if kind is not None:
        raise CaptureError(f"{path!r} is {kind}, and no file; {ADVICE}")
    try:
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as error:
        raise CaptureError(f"there is no file {path!r}; {ADVICE}") from error
    except (OSError, ValueError) as error:
        raise CaptureError(f"{path!r} cannot be read: {error}; {ADVICE}") from error
    return os.fdopen(number, "rb")


class Container:
    """The entries of an archive, by their names without the folder that they are all in.

    Raises:
        CaptureError: it is no archive, or not as torch writes them.
    """

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self.name = name
        self._left = file.seek(0, os.SEEK_END)
        file.seek(0)
        start = file.read(2)
        try:
            self._zip = zipfile.ZipFile(file)
            entries = self._zip.infolist()
            if min((entry.header_offset for entry in entries), default=0):
                raise zipfile.BadZipFile("its first part is no zip file, and a zip file within it is")
        except Exception as error:  # whatever zipfile raises for what is no zip file, or damaged
            what = "is cut off or damaged" if start == b"PK" else "is no archive"
            raise CaptureError(f"{name!r} {what} ({error}); {ADVICE}") from error
        self.names = {entry.filename for entry in entries}
        if len(self.names) != len(entries):
            twice = next(entry.filename for entry in entries if entry is not self._zip.getinfo(entry.filename))
            raise CaptureError(f"{name!r} was not loaded: it has two entries of the name {twice!r}; {ADVICE}")
        root = entries[0].filename.partition("/")[0] + "/" if entries else ""
        self.entries = {each.filename.removeprefix(root): each for each in entries if each.filename.startswith(root)}

    def size(self, entry: str) -> int:
        """Return the number of bytes of an entry; 0 where there is none."""
        return self.entries[entry].file_size if entry in self.entries else 0

    @contextmanager
    def reading(self, entry: str) -> Iterator[IO[bytes]]:
        """Open an entry, which takes its part of the file's size: entries that lie in each other are no archive."""
        info = self.entries.get(entry)
        if info is None:
            raise CaptureError(f"{self.name!r} is damaged: it has no entry {entry}; {ADVICE}")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
            raise CaptureError(
                f"{self.name!r} was not loaded: {entry} in it is compressed or encrypted, which archives of torch are "
                f"not; unpack it, and pack it again without compression"
            )
        self._left -= info.file_size
        if self._left < 0:
            raise CaptureError(f"{self.name!r} is damaged: its entries hold more than the file does")
        try:
            with self._zip.open(info) as file:
                yield file
        except CaptureError:
            raise
        except Exception as error:  # whatever zipfile raises for what is damaged
            raise CaptureError(f"{self.name!r} is cut off or damaged: {entry} in it ({error}); {ADVICE}") from error

    def text(self, entry: str) -> str:
        """Return an entry as text."""
        with self.reading(entry) as file:
            content = file.read()
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise CaptureError(f"{self.name!r} is damaged: {entry} in it is no text ({error})") from error

    def data(self, entry: str) -> Any:
        """Return the JSON of an entry."""
        text = self.text(entry)
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CaptureError(
                f"{self.name!r} is damaged: {entry} in it does not describe a program, as it is no JSON ({error!s:.80})"
            ) from error


@contextmanager
def fresh_archive(
    container: Container, texts: Mapping[str, str], copied: Iterable[tuple[str, str]]
) -> Iterator[IO[bytes]]:
    """Yield a file with these entries: texts, and copies of entries of the container under names of one's own.

    It is a temporary file, which the weights go through piece by piece.
    """
    with tempfile.TemporaryFile() as file:
        with zipfile.ZipFile(file, "w") as archive:
            for entry, text in texts.items():
                archive.writestr(f"archive/{entry}", text)
            for entry, source in copied:
                large = container.size(source) >= _LARGE
                with container.reading(source) as old, archive.open(f"archive/{entry}", "w", force_zip64=large) as new:
                    shutil.copyfileobj(old, new, 1 << 20)
        file.seek(0)
        yield file
