"""The file of a reproducer: a zip archive that Python runs, and the directory where such files are.

It holds ``__main__.py``, a script that runs it again; ``reproducer.json``, the graph, its modules, the pass and the
failure; ``tensors.pt``, which loads with ``weights_only``; ``graph.txt``, to read; and ``objects.pickle``, only where
something has no other form.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxopt_core import PreconditionError
from fxopt_tools.data_values import DataReader, DataWriter

VERSION = 1
_NAME = re.compile(r"\d{3,}_[\w.-]+\.reproducer\.zip")
_DATE = (1980, 1, 1, 0, 0, 0)  # no time, so that equal reproducers are equal files
_MAIN = '''"""Runs a reproducer of fxopt: python THIS_FILE [--trusted]"""

import sys
from pathlib import Path

from fxopt_tools import reproduce

found = reproduce(Path(__file__).parent, trusted="--trusted" in sys.argv[1:])
print(found)
sys.exit(0 if found else 1)
'''


@dataclass(frozen=True)
class Contents:
    """What a file holds.

    Attributes:
        data: what is plain.
        writer: the tensors and objects that ``data`` refers to.
        text: the graph, to read.
    """

    data: dict[str, Any]
    writer: DataWriter
    text: str


def write_file(path: Path, contents: Contents) -> None:
    """Write a file as a whole or not at all.

    Raises:
        OSError: It is there already, or cannot be written.
        Exception: What pickling raises.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".unfinished")
    try:
        with os.fdopen(handle, "wb") as file:
            _write(file, contents)
        _put(Path(temporary), path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _put(temporary: Path, path: Path) -> None:
    """Give a file its name, unless there is one of that name."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError as error:  # a file system without links
        if path.exists():
            raise FileExistsError(str(path)) from error
        temporary.rename(path)


def _write(file: Any, contents: Contents) -> None:
    entries: dict[str, Callable[[], str | bytes]] = {
        "__main__.py": lambda: _MAIN,
        "graph.txt": lambda: contents.text,
        "reproducer.json": lambda: json.dumps({"version": VERSION, **contents.data}, indent=1),
        "tensors.pt": lambda: _saved([_plain(tensor) for tensor in contents.writer.tensors.items]),
    }
    if contents.writer.objects:
        entries["objects.pickle"] = lambda: pickle.dumps(contents.writer.objects)
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in entries.items():
            archive.writestr(zipfile.ZipInfo(name, _DATE), content())


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor without history, hooks and attributes, on the same memory."""
    plain = tensor.detach()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(plain, tensor.requires_grad)
    return plain.requires_grad_(tensor.requires_grad)


def _saved(tensors: list[Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    return buffer.getvalue()


def read_file(path: Path, *, trusted: bool) -> tuple[dict[str, Any], DataReader]:
    """Return what is plain in a file, and what reads the rest.

    Raises:
        PreconditionError: It is no reproducer, or of a newer version of fxopt.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            data = json.loads(archive.read("reproducer.json"))
            if data["version"] > VERSION:
                raise PreconditionError(
                    f"{path} is of version {data['version']}, and this fxopt-tools reads up to {VERSION}: install a "
                    "newer one"
                )
            tensors = torch.load(io.BytesIO(archive.read("tensors.pt")), weights_only=True, map_location=_here)
            pickled = trusted and "objects.pickle" in archive.namelist()
            objects: Sequence[object] = pickle.loads(archive.read("objects.pickle")) if pickled else ()
    except PreconditionError:
        raise
    except Exception as error:  # whatever a damaged file leads to
        raise PreconditionError(
            f"{path} is no reproducer that can be read: {type(error).__name__}: {error}. Expected a file that "
            "fxopt_tools.Reproducers or write_reproducer wrote"
        ) from error
    return data, DataReader(tensors, objects, trusted=trusted)


def _here(storage: Any, location: str) -> Any:
    """Put tensors of a device that this machine lacks on the CPU."""
    kind = location.partition(":")[0]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if kind in ("cpu", "meta") or (accelerator is not None and accelerator.type == kind):
        return None
    return storage


def check_directory(directory: Path) -> int:
    """Return the next number of a reproducer in a directory.

    Raises:
        PreconditionError: It is a file, or holds anything but reproducers.
    """
    if not directory.is_dir():
        if directory.exists() or directory.is_symlink():
            raise PreconditionError(f"{directory} is a file, expected a directory for reproducers: give another path")
        return 0
    names = sorted(path.name for path in directory.iterdir())
    others = [name for name in names if not _NAME.fullmatch(name)]
    if others:
        listed = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
        raise PreconditionError(
            f"{directory} holds other files ({listed}), expected a directory that is new, empty, or holds reproducers "
            "alone: give another path"
        )
    return 1 + max((int(name.partition("_")[0]) for name in names), default=-1)
