"""Read the program of a ``.pt2`` archive, or say what is wrong with the file."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import io
import json
import logging
import os
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, BytesIO, FileIO
from typing import IO, Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from fxopt_capture._torch import SCHEMA
from fxopt_capture.call.caches import is_cache_type, register_cache_type
from fxopt_capture.export.failure import first_line
from fxopt_core.errors import CaptureError
from fxopt_rewrite.special_files import special_kind

_ADVICE = "give a file that torch.export.save or fxopt_capture.save has written"
_MODEL = "models/model.json"


PathLike = str | bytes | os.PathLike[str] | os.PathLike[bytes]


@dataclass(frozen=True)
class Archive:
    """The program in a file, its extra files by name, and the file's name for messages."""

    name: str
    program: ExportedProgram
    extra: Mapping[str, str]


def read_archive(source: PathLike | IO[bytes], *, weights_only: bool) -> Archive:
    """Read an archive from a path, or from a file that is open for reading bytes.

    Raises:
        CaptureError: there is no such file, it is no archive, not one that this version of torch reads, or it holds
            pickles of anything but tensors and caches though `weights_only` is set.
    """
    name, file = _opened(source)
    description, classes = _check(name, file, weights_only)
    try:
        _know_types(name, description)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise CaptureError(f"{name!r} is damaged: how it is called cannot be read ({error!r:.200})") from error
    extra: dict[str, str] = {"": ""}  # torch fills a dictionary only if it is not empty
    failures: list[BaseException] = []
    try:
        with _quiet(failures), torch.serialization.safe_globals(classes):
            program = torch.export.load(file, extra_files=extra)
    except Exception as error:  # whatever a damaged or foreign file leads to
        cause = failures[0] if failures else error
        raise CaptureError(_failure(name, description, cause)) from cause
    extra.pop("", None)
    return Archive(name, program, extra)


def _opened(source: PathLike | IO[bytes]) -> tuple[str, str | BytesIO]:
    """Return the name of a file for messages, and what `zipfile` and torch read it from."""
    if isinstance(source, str | bytes | os.PathLike):
        path = os.fsdecode(source)
        return path, path
    if not callable(getattr(source, "read", None)):
        raise CaptureError(f"a {type(source).__name__} is neither a path nor an open file; {_ADVICE}")
    name = str(getattr(source, "name", f"a {type(source).__name__}"))
    if isinstance(source, FileIO | BufferedReader) and special_kind(source.fileno()) == "a device":
        raise CaptureError(f"{name!r} is a device, and no file; {_ADVICE}")
    content: object = source.read()
    if not isinstance(content, bytes):
        raise CaptureError(f"{name!r} is open for reading text; open it for reading bytes: open(path, 'rb')")
    return name, BytesIO(content)


def _failure(path: str, description: Mapping[str, Any], cause: BaseException) -> str:
    written = description.get("torch_version")
    by = f", which torch {written} has written and torch {torch.__version__} reads" if written else ""
    return (
        f"torch.export.load cannot read {path!r}{by}: {type(cause).__name__}: {first_line(cause)}. The file may be "
        f"damaged, or its operators may not be registered here: import the package that registers them, and see the "
        f"chained error"
    )


@contextmanager
def _quiet(failures: list[BaseException]) -> Iterator[None]:
    """Collect the exceptions that torch logs when a file cannot be read, instead of showing them."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.exc_info[1] is not None:
                failures.append(record.exc_info[1])

    loggers = [logging.getLogger(name) for name in ("torch.export", "torch._export")]
    before = [(logger, logger.propagate, logger.handlers) for logger in loggers]
    try:
        for logger in loggers:
            logger.propagate, logger.handlers = False, [Handler()]
        yield
    finally:
        for logger, propagate, handlers in before:
            logger.propagate, logger.handlers = propagate, handlers


def _check(name: str, file: str | BytesIO, weights_only: bool) -> tuple[Mapping[str, Any], list[Any]]:
    """Check a file as far as that goes without torch, and leave it at its start.

    Returns how it describes its program, and the harmless classes whose instances are pickled in it.
    """
    if isinstance(file, str) and not os.path.exists(file):
        raise CaptureError(f"there is no file {name!r}; {_ADVICE}")
    kind = special_kind(file) if isinstance(file, str) else None
    if kind is not None:
        raise CaptureError(f"{name!r} is {kind}, and no file; {_ADVICE}")
    try:
        return _read(name, file, weights_only)
    except CaptureError:
        raise
    except OSError as error:
        raise CaptureError(f"{name!r} cannot be read: {error}; {_ADVICE}") from error
    except Exception as error:  # whatever zipfile raises for what is no zip file, or damaged
        what = "is cut off or damaged" if _start(file) == b"PK" else "is no archive"
        raise CaptureError(f"{name!r} {what} ({error}); {_ADVICE}") from error
    finally:
        if isinstance(file, BytesIO):
            file.seek(0)


def _read(name: str, file: str | BytesIO, weights_only: bool) -> tuple[Mapping[str, Any], list[Any]]:
    with zipfile.ZipFile(file) as archive:
        if min((entry.header_offset for entry in archive.infolist()), default=0):
            raise zipfile.BadZipFile("its first part is no zip file, and a zip file within it is")
        records = {entry.partition("/")[2]: entry for entry in archive.namelist()}
        old = "serialized_exported_program.json" in archive.namelist()
        description = {} if old else _description(name, archive, records)
        return description, check_pickles(name, archive, records) if weights_only else []


def _start(file: str | BytesIO) -> bytes:
    if isinstance(file, BytesIO):
        return file.getvalue()[:2]
    with open(file, "rb") as opened:
        return opened.read(2)


def _description(path: str, archive: zipfile.ZipFile, records: Mapping[str, str]) -> Mapping[str, Any]:
    version = archive.read(records["archive_version"]).decode() if "archive_version" in records else None
    if version not in (None, "0"):
        raise CaptureError(
            f"{path!r} is an archive of version {version}, and torch {torch.__version__} reads version 0; install the "
            f"torch that has written it, or a newer one"
        )
    if _MODEL not in records:
        raise CaptureError(f"{path!r} {_kind(records)}; {_ADVICE}")
    try:
        found = json.loads(archive.read(records[_MODEL]))
        major, minor = (int(found["schema_version"][key]) for key in ("major", "minor"))
    except (ValueError, KeyError, TypeError) as error:
        raise CaptureError(f"{path!r} is damaged: {_MODEL} in it does not describe a program ({error!r})") from error
    if (major, minor) > SCHEMA and major != SCHEMA[0]:
        raise CaptureError(
            f"{path!r} was written by torch {found.get('torch_version')} in schema {major}.{minor}, and torch "
            f"{torch.__version__} reads schemas up to {SCHEMA[0]}.{SCHEMA[1]}; install that torch, or "
            f"a newer one"
        )
    return dict(found)


def _kind(records: Mapping[str, str]) -> str:
    """Say what an archive is that holds no program named ``model``."""
    others = [name for name in records if name.startswith("models/")]
    if others:
        return f"holds several programs ({', '.join(others)}) and none of them named `model`"
    if any(name.startswith("data/aotinductor/") for name in records):
        return "holds a compiled model of AOTInductor, and no program"
    if "constants.pkl" in records:
        return "holds a TorchScript module, and no program"
    if "data.pkl" in records:
        return "was written by torch.save, and holds no program; load it with torch.load, and capture the model"
    return "is a zip file without a program of torch.export in it"


def _know_types(path: str, description: Mapping[str, Any]) -> None:
    """Let torch know the containers of inputs and outputs, where they can be found, or say which it lacks."""
    for name in sorted(set(_types(description))):
        if name not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE and not _found(name):
            raise CaptureError(
                f"the inputs or outputs of the program in {path!r} are of type {name}, which torch.export does not "
                f"know in this process; import the module that defines and registers it "
                f"(torch.export.register_dataclass, or `import transformers`) before loading"
            )


def _found(name: str) -> bool:
    """Register a type by its name, where its library or its module is there; no other module is imported."""
    module, _, cls = name.rpartition(".")
    if module.startswith("transformers.") and importlib.util.find_spec("transformers") is not None:
        try:
            importlib.import_module(module)  # which registers its own outputs
        except ImportError:
            return False
    found = getattr(sys.modules.get(module), cls, None)
    if name not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE and isinstance(found, type):
        if is_cache_type(found):
            register_cache_type(found)
        elif dataclasses.is_dataclass(found):
            torch.export.register_dataclass(found, serialized_type_name=name)
    return name in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE


def _types(description: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the containers that the program's inputs and outputs consist of."""
    calls = description.get("graph_module", {}).get("module_call_graph", ())
    for call in calls[:1]:
        for key in ("in_spec", "out_spec"):
            spec = (call.get("signature") or {}).get(key)
            yield from _types_of(json.loads(spec)[1] if spec else {})


def _types_of(spec: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(spec.get("type"), str):
        yield spec["type"]
    for child in spec.get("children_spec", ()):
        yield from _types_of(child)


_CACHE = re.compile(r"(transformers\.cache_utils)\.(\w+(?:Cache|Layer))")  # plain objects with tensors in them


def check_pickles(path: str, archive: zipfile.ZipFile, records: Mapping[str, str]) -> list[Any]:
    """Return the classes of caches that an archive pickles: torch does not take them for harmless by itself.

    Raises:
        CaptureError: it holds pickles of other objects, or its files are damaged.
    """
    classes = []
    for record, name in records.items():
        content = archive.read(name) if record.endswith((".json", ".pt")) else b""
        try:
            named = list(_named(record, content))
        except Exception as error:  # whatever a damaged file leads to
            raise CaptureError(f"{path!r} is damaged: {record} in it cannot be read ({error})") from error
        for one in named:
            match = _CACHE.fullmatch(one)
            has_transformers = importlib.util.find_spec("transformers") is not None
            found = getattr(importlib.import_module(match[1]), match[2], None) if match and has_transformers else None
            if not isinstance(found, type):
                raise CaptureError(
                    f"{path!r} was not loaded: {record} in it names {one}, and is pickled as Python objects, so that "
                    f"reading it runs code that the file names; if you trust whoever has written it, load it with "
                    f"weights_only=False"
                )
            classes.append(found)
    return classes


def _named(record: str, content: bytes) -> Iterator[str]:
    """Yield what a file makes torch unpickle, besides tensors."""
    folder, _, file = record.rpartition("/")
    if folder in ("data/weights", "data/constants") and file.endswith("_config.json"):
        config = json.loads(content).get("config", {})
        yield from (f"`{key}`" for key, entry in config.items() if entry.get("use_pickle"))
    elif file.endswith(".pt"):
        yield from torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
