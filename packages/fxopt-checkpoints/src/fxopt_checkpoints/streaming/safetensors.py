"""Files in safetensors format: what they hold by their headers, and their tensors read right into others.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, where its bytes
begin and end), and the bytes of all tensors without gaps. It is read by plain reads and not mapped into memory: pages
of a mapped file count as memory of the process, and a file that was truncated meanwhile would end it.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fxopt_core.errors import CheckpointError
from fxopt_core.naming import type_text
from fxopt_rewrite.special_files import special_kind

_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LONGEST_HEADER = 100_000_000  # as safetensors itself allows
_LARGEST = 2**63 - 1  # number of a size or place
_DIMENSIONS = 64  # as torch has them
_LISTED = 50
_CHUNK = 1 << 23  # bytes that are read at a time where they have to be converted
_OTHER_KINDS = {
    b"PK": "a zip archive, as torch.save and torch.export.save write it",
    b"\x80": "a pickle, as torch.save used to write it",
    b"version https://git-lfs": "a pointer to a file that Git LFS has not fetched: run `git lfs pull`",
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: how many bytes from where."""

    key: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    bytes: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name. Nothing of their values is read.

    Raises:
        CheckpointError: There is no such file, it is none in safetensors format, or it is truncated or contradicts
            itself; all tensors that are concerned are named.
    """
    check_is_file(file)
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            text, start = _header_text(file, stream, size)
    except OSError as error:
        raise CheckpointError(f"`{file}` cannot be read: {error.strerror or error}") from error
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=distinct_names)
    except (ValueError, RecursionError) as error:  # also what is no UTF-8
        raise CheckpointError(f"`{file}` is no safetensors file: its header is no JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"`{file}` is no safetensors file: its header is {type_text(header)}")
    header.pop("__metadata__", None)
    problems: list[str] = []
    stored = {}
    for key, entry in header.items():
        try:
            stored[key] = _stored(key, entry, file, start)
        except ValueError as error:
            problems.append(f"`{key}` in `{file}` {error}")
    problems = problems or list(_misplaced(stored.values(), file, start, size))
    check_problems(problems)
    return stored


def check_is_file(file: Path) -> None:
    """Raise a `CheckpointError` where a path is no regular file: reading it might never end."""
    kind = special_kind(file)
    if kind is not None:
        raise CheckpointError(f"`{file}` cannot be read: it is {kind}, expected a file of a checkpoint")


def check_problems(problems: Sequence[str]) -> None:
    """Raise a `CheckpointError` that lists problems, if there are any: the first of many."""
    if problems:
        more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
        raise CheckpointError("\n  ".join([*problems[:_LISTED], *more]))


def _header_text(file: Path, stream: BinaryIO, size: int) -> tuple[bytes, int]:
    """Return the text of a header, and where it ends."""
    first = stream.read(32)
    length = int.from_bytes(first[:8], "little")
    if size < 8 or length > _LONGEST_HEADER or 8 + length > size:
        for beginning, kind in _OTHER_KINDS.items():
            if first.startswith(beginning):
                raise CheckpointError(f"`{file}` is no safetensors file, but {kind}")
        raise CheckpointError(
            f"`{file}` is no safetensors file, or truncated within its header: it has {size} bytes, and its first 8 "
            f"say that the header takes {length}"
        )
    stream.seek(8)
    return stream.read(length), 8 + length


def distinct_names(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, which may have a name but once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it has `{twice:.80}` twice")
    return found


def _stored(key: str, entry: Any, file: Path, base: int) -> StoredTensor:
    """Read one entry of a header; a `ValueError` says what is wrong with it."""
    try:
        name, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sound = all(type(number) is int and 0 <= number <= _LARGEST for number in (*shape, begin, end))
        sound = sound and len(shape) <= _DIMENSIONS
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise ValueError(f"is described by {_shown(entry)}: no dtype, shape and offsets")
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"is of dtype {name!r:.80}, which torch or fxopt does not have")
    expected = math.prod(shape) * _DTYPES[name].itemsize
    if end - begin != expected:
        raise ValueError(f"has {end - begin} bytes, expected {expected} for {name} of shape {shape}")
    return StoredTensor(key, file, _DTYPES[name], shape, base + begin, expected)


def _shown(entry: Any) -> str:
    try:
        return repr(str(entry)[:80])
    except (ValueError, RecursionError):  # too long a number, or too deep
        return type_text(entry)


def _misplaced(stored: Iterable[StoredTensor], file: Path, start: int, size: int) -> Iterator[str]:
    """Say what is wrong with the places of tensors: they follow one another, up to the end of the file."""
    end = start
    for each in sorted(stored, key=lambda each: (each.start, each.bytes)):
        if each.start != end:
            yield f"`{each.key}` in `{file}` begins at byte {each.start}, expected {end}, where the one before ends"
            return
        end += each.bytes
        if end > size:
            yield f"`{each.key}` in `{file}` is truncated: it ends at byte {end}, and the file at {size}"
    if end < size:
        yield f"`{file}` has {size - end} bytes after its last tensor, expected none"


class Reader:
    """Reads tensors of files, which stay open until it is closed."""

    def __init__(self) -> None:
        self._open: dict[Path, BinaryIO] = {}
        self._chunk: Tensor | None = None

    def __enter__(self) -> Reader:
        if sys.byteorder != "little":
            raise CheckpointError("safetensors files are little-endian, and this machine is not")
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._open.values():
            stream.close()
        self._chunk = None

    def read(self, stored: StoredTensor) -> Tensor:
        """Return a new tensor, in CPU memory."""
        made = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        self.read_into(stored, made)
        return made

    def read_into(self, stored: StoredTensor, place: Tensor) -> None:
        """Read a tensor into another one of its shape, which may be a view, of another dtype, and on any device.

        Raises:
            CheckpointError: Reading fails, or the file ends too early. Part of the tensor may be read then.
        """
        if place.numel():
            try:
                self._read(stored, stored.start, place.detach())
            except OSError as error:
                raise CheckpointError(
                    f"`{stored.key}` cannot be read from `{stored.file}`: {error.strerror or error}"
                ) from error

    def chunks(self, stored: StoredTensor) -> Iterator[Tensor]:
        """Yield the bytes of a tensor in parts; each is valid until the next one."""
        for begin in range(0, stored.bytes, _CHUNK):
            chunk = self._buffer(min(_CHUNK, stored.bytes - begin))
            self._fill(stored, stored.start + begin, chunk)
            yield chunk

    def _read(self, stored: StoredTensor, start: int, place: Tensor) -> None:
        if place.device.type == "cpu" and place.dtype == stored.dtype and place.is_contiguous():
            self._fill(stored, start, place)
            return
        row = math.prod(place.shape[1:]) * stored.dtype.itemsize
        if row > _CHUNK and place.dim() > 0:
            for index in range(place.shape[0]):
                self._read(stored, start + index * row, place[index])
            return
        rows = place.unsqueeze(0) if place.dim() == 0 else place
        count = max(1, _CHUNK // row)
        for index in range(0, rows.shape[0], count):
            part = rows[index : index + count]
            chunk = self._buffer(part.shape[0] * row)
            self._fill(stored, start + index * row, chunk)
            with torch.no_grad():
                part.copy_(chunk.view(stored.dtype).view(part.shape))

    def _buffer(self, size: int) -> Tensor:
        if self._chunk is None:
            self._chunk = torch.empty(_CHUNK, dtype=torch.uint8, device="cpu")
        return self._chunk[:size]

    def _fill(self, stored: StoredTensor, start: int, place: Tensor) -> None:
        """Read bytes into the memory of a contiguous tensor."""
        if stored.file not in self._open:
            self._open[stored.file] = stored.file.open("rb", buffering=0)
        stream, left = self._open[stored.file], place.numel() * place.element_size()
        memory = memoryview((ctypes.c_char * left).from_address(place.data_ptr())).cast("B")
        stream.seek(start)
        while left:
            count = stream.readinto(memory[-left:])  # type: ignore[attr-defined]  # a raw file has it
            if not count:
                raise CheckpointError(
                    f"`{stored.file}` became shorter while it was read: {left} bytes of `{stored.key}` are missing"
                )
            left -= count
