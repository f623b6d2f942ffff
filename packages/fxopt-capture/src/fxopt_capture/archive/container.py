"""The file of an archive: a zip file of uncompressed entries, written completely or not at all, and mapped to read."""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

from fxopt_capture.exporting.failure import first_line
from fxopt_core import type_text
from fxopt_core.errors import CaptureError
from fxopt_rewrite import special_kind

PathLike = str | bytes | os.PathLike[str] | os.PathLike[bytes]
Buffer = bytes | bytearray | memoryview | Any
#: Entries begin at multiples of this in the file, and tensors in them too.
ALIGNED = 64
ADVICE = "expected an archive, as fxopt_capture.save writes it"
#: The header before the content of an entry: its mark, 22 bytes, the lengths of the name and of the extra fields.
_LOCAL = struct.Struct("<4s22xHH")
#: The size from which an entry needs zip64, as `zipfile` decides it.
_LARGE = 1 << 31
_PADDING = 0xD935  # the extra field that other tools also use to align entries


# -- writing


def checked_target(target: PathLike | IO[bytes]) -> str | IO[bytes]:
    """Return the path to write to, or the file that is open for it.

    Raises:
        CaptureError: it is no place for an archive: a device, or a file of another format.
    """
    if not isinstance(target, str | bytes | os.PathLike):
        if not callable(getattr(target, "write", None)):
            raise CaptureError(f"{type_text(target)} is neither a path nor an open file to save to")
        return target
    path = os.fsdecode(target)
    if special_kind(path) is not None:
        raise CaptureError(f"{path!r} cannot be written, as it is {special_kind(path)}; give the path of a file")
    if path.endswith(".pt2"):
        raise CaptureError(
            f"{path!r} has the suffix of another format: save writes fxopt's own, such as 'model.fxopt'. For a file "
            f"that torch reads without fxopt: torch.export.save(fxopt_capture.export(graph_module), {path!r})"
        )
    return path


def write_archive(target: str | IO[bytes], entries: Mapping[str, Sequence[Buffer]]) -> None:
    """Write an archive to an open file, or to a new file beside the target, which then replaces the target.

    Raises:
        CaptureError: the file cannot be written; an existing one is unchanged.
    """
    name = target if isinstance(target, str) else str(getattr(target, "name", type_text(target)))
    try:
        if isinstance(target, str):
            _replace(os.path.realpath(target), entries)
            return
        with tempfile.TemporaryFile() as file:
            _write(file, entries)
            file.seek(0)
            shutil.copyfileobj(file, target, 1 << 20)
    except (OSError, TypeError, ValueError) as error:  # a file that is open for text, or closed
        reason = getattr(error, "strerror", None) or first_line(error)
        raise CaptureError(f"{name!r} cannot be written: {reason}; whatever was there is unchanged") from error


def _replace(path: str, entries: Mapping[str, Sequence[Buffer]]) -> None:
    """Write a file beside the one at a path and move it there; remove it if anything fails."""
    beside = f"{path}.{os.getpid()}.part"
    try:
        with open(beside, "wb") as file:
            _write(file, entries)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        with contextlib.suppress(OSError):
            os.remove(beside)


def _write(file: IO[bytes], entries: Mapping[str, Sequence[Buffer]]) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, parts in entries.items():
            info = zipfile.ZipInfo(name)
            large = sum(len(part) for part in parts) >= _LARGE
            start = file.tell() + _LOCAL.size + len(name) + (20 if large else 0)  # of the zip64 field
            # 4 bytes for the number and the length of the extra field that fills the gap.
            gap = -(start + 4) % ALIGNED
            info.extra = struct.pack("<HH", _PADDING, gap) + bytes(gap)
            with archive.open(info, "w", force_zip64=large) as entry:
                for part in parts:
                    entry.write(part)


# -- reading


@contextmanager
def opened(source: PathLike | IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the name of a file, for messages, and a seekable file of its bytes.

    Raises:
        CaptureError: it is not a file, cannot be read, or is open for text.
    """
    if isinstance(source, str | bytes | os.PathLike):
        path = os.fsdecode(source)
        kind = special_kind(path)  # opening a socket says less
        if kind is not None:
            raise CaptureError(f"{path!r} is {kind}, not a file; {ADVICE}")
        try:
            # A pipe may have taken the file's place by now, and opening it would wait for a writer.
            number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        except FileNotFoundError as error:
            raise CaptureError(f"there is no file {path!r}; {ADVICE}") from error
        except (OSError, ValueError) as error:
            raise CaptureError(f"{path!r} cannot be read: {error}; {ADVICE}") from error
        with os.fdopen(number, "rb") as file:
            if special_kind(number) is not None:  # it was replaced meanwhile
                raise CaptureError(f"{path!r} is {special_kind(number)}, not a file; {ADVICE}")
            yield path, file
        return
    if not callable(getattr(source, "read", None)):
        raise CaptureError(f"{type_text(source)} is neither a path nor an open file; {ADVICE}")
    name = str(getattr(source, "name", type_text(source)))
    if isinstance(source, io.FileIO | io.BufferedReader) and special_kind(source.fileno()) == "a device":
        raise CaptureError(f"{name!r} is a device, not a file; {ADVICE}")
    content: object = source.read()
    if not isinstance(content, bytes):
        raise CaptureError(f"{name!r} is open for reading text; open it for reading bytes: open(path, 'rb')")
    yield name, io.BytesIO(content)


class Container:
    """The entries of an archive, checked to be uncompressed, with distinct names and without overlaps.

    Raises:
        CaptureError: the file is not a zip file, or not one as `save` writes it.
    """

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self.name = name
        start = file.read(2)
        file.seek(0)
        try:
            with zipfile.ZipFile(file) as archive:
                self._entries = archive.infolist()
                self.memory = _mapped(file)
                self._places = self._checked()
        except CaptureError:
            raise
        except Exception as error:  # whatever zipfile raises for what is no zip file, or damaged
            what = "is cut off or damaged" if start == b"PK" else "is not an archive"
            raise CaptureError(f"{name!r} {what} ({error}); {ADVICE}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def _checked(self) -> dict[str, tuple[int, zipfile.ZipInfo]]:
        """Return where the content of each entry begins."""
        places: dict[str, tuple[int, zipfile.ZipInfo]] = {}
        end = 0
        for info in sorted(self._entries, key=lambda info: info.header_offset):
            if info.filename in places:
                raise CaptureError(f"{self.name!r} was not loaded: it has two entries of the name {info.filename!r}")
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
                raise CaptureError(
                    f"{self.name!r} was not loaded: {info.filename} in it is compressed or encrypted; pack it again "
                    f"without compression"
                )
            magic, length, extra = _LOCAL.unpack_from(self.memory, info.header_offset)
            start = info.header_offset + _LOCAL.size + length + extra
            if info.header_offset < end or magic != b"PK\3\4" or start + info.file_size > len(self.memory):
                raise zipfile.BadZipFile(f"entry {info.filename!r} lies in another one, or beyond the end")
            # `zipfile` takes names from the directory at the end of a file, other readers from here.
            local = bytes(self.memory[info.header_offset + _LOCAL.size : start - extra])
            if local != info.orig_filename.encode():
                raise zipfile.BadZipFile(f"entry {info.filename!r} has another name in its local header")
            end = start + info.file_size
            places[info.filename] = start, info
        # `zipfile` itself accepts anything before the first entry.
        if places and min(info.header_offset for _, info in places.values()):
            raise zipfile.BadZipFile("its first part is not a zip file, but a zip file lies within it")
        return places

    def place(self, entry: str) -> tuple[int, int]:
        """Return the first byte of an entry in the memory, and the number of its bytes."""
        if entry not in self._places:
            raise CaptureError(f"{self.name!r} is damaged: it has no entry {entry}; {ADVICE}")
        start, info = self._places[entry]
        return start, info.file_size

    def text(self, entry: str) -> str:
        """Return an entry as text."""
        start, size = self.place(entry)
        content = bytes(self.memory[start : start + size])
        # Weights have no such check: mapped, they are read when they are used, and not on loading.
        if zlib.crc32(content) != self._places[entry][1].CRC:
            raise CaptureError(f"{self.name!r} is cut off or damaged: Bad CRC-32 for {entry} in it; {ADVICE}")
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise CaptureError(f"{self.name!r} is damaged: {entry} in it is not text ({error})") from error

    def data(self, entry: str) -> Any:
        """Return the JSON of an entry."""
        return parsed(self.text(entry), f"{self.name!r} is damaged: {entry} in it")


def parsed(text: str, what: str) -> Any:
    """Return JSON, or raise a `CaptureError` that begins with ``what``."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CaptureError(f"{what} is not JSON ({error!s:.80})") from error


def _mapped(file: IO[bytes]) -> Any:
    """Return the bytes of a file, mapped copy-on-write."""
    if isinstance(file, io.BytesIO):
        return bytearray(file.getbuffer())
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
