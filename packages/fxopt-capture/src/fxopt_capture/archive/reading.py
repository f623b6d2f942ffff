"""Read the program of a ``.pt2`` archive, or say what is wrong with the file."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch.export import ExportedProgram

from fxopt_capture._torch import SCHEMA
from fxopt_capture.archive.container import ADVICE, Container, PathLike, fresh_archive, opened
from fxopt_capture.archive.schema import checked
from fxopt_capture.export.failure import first_line
from fxopt_core.errors import CaptureError

_MODEL = "models/model.json"
_TRUST = "if you trust whoever has written it as you trust a program, load it with trusted=True"
_AGAIN = "give it to torch.export.load and torch.export.save of this version, if you trust it"


@dataclass(frozen=True)
class Archive:
    """The program in a file, fxopt's document beside it if there is one, and the file's name for messages."""

    name: str
    program: ExportedProgram
    document: str | None


def read_archive(source: PathLike | IO[bytes], document: str, *, trusted: bool) -> Archive:
    """Read an archive from a path, or from a file that is open for reading bytes.

    `document` is the name of the extra file to read with the program. Where the file is `trusted`, torch reads it as it
    is; otherwise torch is given a fresh archive of what was checked.

    Raises:
        CaptureError: there is no such file, it is no archive, not one that this version of torch reads, or it holds
            something that needs trust.
    """
    with opened(source) as (name, file):
        if trusted:
            return _as_it_is(name, file, document)
        container = Container(name, file)
        description = _description(container)
        extra = container.text(f"extra/{document}") if f"extra/{document}" in container.entries else None
        program = checked("ExportedProgram", description, name, _MODEL)
        texts = {".data/version": "6\n", "archive_format": "pt2", "archive_version": "0", _MODEL: json.dumps(program)}
        texts["data/sample_inputs/model.pt"] = ""  # a pickle, which nothing here needs
        copied: list[tuple[str, str]] = []
        for folder, prefix in (("weights", "weight_"), ("constants", "tensor_")):
            config = _payload(container, folder, prefix)
            texts[f"data/{folder}/model_{folder}_config.json"] = json.dumps(config)
            entries = dict.fromkeys(f"data/{folder}/{meta['path_name']}" for meta in config["config"].values())
            copied += zip(entries, entries, strict=True)
        with fresh_archive(container, texts, copied) as fresh:
            return Archive(name, _loaded(name, fresh, description, {"": ""}), extra)


def _as_it_is(name: str, file: IO[bytes], document: str) -> Archive:
    extra: dict[str, str] = {"": ""}  # torch fills a dictionary only if it is not empty
    return Archive(name, _loaded(name, file, {}, extra), extra.get(document))


def _loaded(name: str, file: IO[bytes], description: Mapping[str, Any], extra: dict[str, str]) -> ExportedProgram:
    failures: list[BaseException] = []
    try:
        with _quiet(failures):
            return torch.export.load(file, extra_files=extra)
    except Exception as error:  # whatever a damaged or foreign file leads to
        cause = failures[0] if failures else error
        written = description.get("torch_version")
        by = f", which torch {written} has written and torch {torch.__version__} reads" if written else ""
        raise CaptureError(
            f"torch.export.load cannot read {name!r}{by}: {type(cause).__name__}: {first_line(cause)}. The file may be "
            f"damaged, or its operators may not be registered here: import the package that registers them"
        ) from cause


@contextmanager
def _quiet(failures: list[BaseException]) -> Iterator[None]:
    """Collect the exceptions that torch's loggers are given when a file cannot be read, instead of showing them."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.exc_info[1] is not None:
                failures.append(record.exc_info[1])

    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"]
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger, logger.propagate, logger.handlers) for logger in loggers]
    try:
        for logger in loggers:
            logger.propagate, logger.handlers = False, [Handler()]
        yield
    finally:
        for logger, propagate, handlers in before:
            logger.propagate, logger.handlers = propagate, handlers


def _description(container: Container) -> Mapping[str, Any]:
    """Return the JSON of the program, of a version that this torch reads."""
    path, entries = container.name, container.entries
    version = container.text("archive_version") if "archive_version" in entries else "0"
    if version != "0":
        raise CaptureError(
            f"{path!r} is an archive of version {version:.20}, and torch {torch.__version__} reads version 0; install "
            f"the torch that has written it, or a newer one"
        )
    if _MODEL not in entries:
        raise CaptureError(f"{path!r} {_kind(container)}; {ADVICE}")
    found = container.data(_MODEL)
    try:
        major, minor = (int(found["schema_version"][key]) for key in ("major", "minor"))
    except (ValueError, KeyError, TypeError) as error:
        raise CaptureError(f"{path!r} is damaged: {_MODEL} in it does not describe a program ({error!r})") from error
    if (major, minor) > SCHEMA and major != SCHEMA[0]:
        raise CaptureError(
            f"{path!r} was written by torch {found.get('torch_version')!s:.40} in schema {major}.{minor}, and torch "
            f"{torch.__version__} reads schemas up to {SCHEMA[0]}.{SCHEMA[1]}; install that torch, or "
            f"a newer one"
        )
    return dict(found)


def _kind(container: Container) -> str:
    """Say what an archive is that holds no program named ``model``."""
    if any(name.startswith("serialized_") for name in container.names):
        return f"is an archive of torch's older format, which consists of pickles. To convert it, {_AGAIN}"
    others = [name for name in container.entries if name.startswith("models/")]
    if others:
        return f"holds several programs ({', '.join(others)}) and none of them named `model`"
    if any(name.startswith("data/aotinductor/") for name in container.entries):
        return "holds a compiled model of AOTInductor, and no program"
    if "constants.pkl" in container.entries:
        return "holds a TorchScript module, and no program"
    if "data.pkl" in container.entries:
        return "was written by torch.save, and holds no program; load it with torch.load, and capture the model"
    return "is a zip file without a program of torch.export in it"


def _payload(container: Container, folder: str, prefix: str) -> dict[str, Any]:
    """Return what an archive says of its weights or constants: plain tensors in entries of their own."""
    path, entry = container.name, f"data/{folder}/model_{folder}_config.json"
    if f"data/{folder}/model.pt" in container.entries:
        raise CaptureError(
            f"{path!r} has its {folder} in a pickle, as older versions of torch write them. To convert it, {_AGAIN}"
        )
    config: dict[str, Any] = checked("PayloadConfig", container.data(entry), path, entry)
    for key, meta in config.get("config", {}).items():
        file = str(meta.get("path_name"))
        if meta.get("use_pickle", True) or meta.get("tensor_meta") is None:
            raise CaptureError(
                f"{path!r} was not loaded: {entry} in it names `{key:.80}`, which is pickled as Python objects, so "
                f"that reading it runs code that the file names; {_TRUST}"
            )
        if not re.fullmatch(rf"{prefix}\d{{1,9}}", file):
            raise CaptureError(
                f"{path!r} was not loaded: {entry} in it has `{key:.80}` in {file!r:.80}, expected {prefix} and a "
                f"number: anything else is a Python object or belongs to something else"
            )
        sizes = [size.get("as_int", 0) for size in meta["tensor_meta"].get("sizes", ())]
        if not container.size(f"data/{folder}/{file}") and math.prod(sizes):
            raise CaptureError(f"{path!r} is damaged: it holds nothing of `{key:.80}`, a tensor of sizes {sizes!s:.80}")
    return {"config": config.get("config", {})}
