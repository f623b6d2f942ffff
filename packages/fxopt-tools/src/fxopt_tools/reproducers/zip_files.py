"""The file of a reproducer, a zip archive that Python can run, and directories of such files.

It contains ``__main__.py``, a script that runs it again; ``reproducer.json``, the graph, its modules, the pass and the
failure; ``tensors.pt``, which loads with ``weights_only``; ``graph.txt`` for people; and ``objects.pickle``, if some
objects have no other form.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxopt_core import PreconditionError
from fxopt_rewrite.special_files import special_kind
from fxopt_tools.output_directory import own_files
from fxopt_tools.reproducers.module_data import DataReader, DataWriter

VERSION = 2
_NAME = re.compile(r"\d{3,}_[\w.-]+\.reproducer\.zip")
_DATE = (1980, 1, 1, 0, 0, 0)  # fixed, so that equal reproducers are equal files
_MAIN = '''"""Runs a reproducer of fxopt: python THIS_FILE [--trusted]"""

import sys
from pathlib import Path

from fxopt_tools import reproduce

found = reproduce(Path(__file__).parent, trusted="--trusted" in sys.argv[1:])
print(found)
sys.exit(0 if found else 1)
'''


def write_file(path: Path, data: dict[str, Any], writer: DataWriter, text: str) -> None:
    """Write a file of JSON data, the tensors and objects that it refers to, and a text, completely or not at all.

    Raises:
        OSError: It exists already, or cannot be written.
        Exception: Whatever pickling raises.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".unfinished")
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr(zipfile.ZipInfo("__main__.py", _DATE), _MAIN)
            archive.writestr(zipfile.ZipInfo("graph.txt", _DATE), text)
            content = json.dumps({"version": VERSION, **data}, indent=1)
            archive.writestr(zipfile.ZipInfo("reproducer.json", _DATE), content)
            with archive.open(zipfile.ZipInfo("tensors.pt", _DATE), "w", force_zip64=True) as entry:
                torch.save([_plain(tensor) for tensor in writer.tensors], entry)
            if writer.objects:
                archive.writestr(zipfile.ZipInfo("objects.pickle", _DATE), pickle.dumps(writer.objects))
        _put(Path(temporary), path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _put(temporary: Path, path: Path) -> None:
    """Give a file its name unless that is taken."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError as error:  # a file system without links
        if path.exists():
            raise FileExistsError(str(path)) from error
        temporary.rename(path)


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor without history, hooks and attributes that shares its memory."""
    plain = tensor.detach()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(plain, tensor.requires_grad)
    return plain.requires_grad_(tensor.requires_grad)


def read_file(path: Path, *, trusted: bool) -> tuple[dict[str, Any], DataReader]:
    """Return the JSON data of a file, and a reader for what it refers to.

    Raises:
        PreconditionError: It is not a reproducer, or of a newer version of fxopt.
    """
    try:
        if special_kind(path) is not None:
            raise OSError(f"it is {special_kind(path)}")
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
    except Exception as error:  # a damaged file can raise anything
        raise PreconditionError(
            f"{path} is no reproducer that can be read: {type(error).__name__}: {error}. Expected a file that "
            "fxopt_tools.Reproducers or write_reproducer wrote"
        ) from error
    return data, DataReader(tensors, objects, trusted=trusted)


def _here(storage: Any, location: str) -> Any:
    """Load tensors of a device that this machine lacks to the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here = {"cpu", "meta", *([] if accelerator is None else [accelerator.type])}
    return None if location.partition(":")[0] in here else storage


def check_directory(directory: Path) -> int:
    """Return the number of the next reproducer in a directory.

    Raises:
        PreconditionError: It is a file, or holds other files than reproducers.
    """
    expected = "a new or empty directory for reproducers, or one with earlier reproducers"
    found = own_files(directory, expected, lambda path: _NAME.fullmatch(path.name) is not None)
    return 1 + max((int(path.name.partition("_")[0]) for path in found), default=-1)
