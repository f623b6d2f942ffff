"""What is pickled in an archive: torch unpickles some of its files, which runs the code that they name."""

from __future__ import annotations

import importlib
import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fxopt_core.errors import CaptureError

_CACHE = re.compile(r"(transformers\.cache_utils)\.(\w+(?:Cache|Layer))")  # plain objects with tensors in them


def check_pickles(path: str, archive: zipfile.ZipFile, records: Mapping[str, str]) -> list[Any]:
    """Refuse an archive for which torch would unpickle more than tensors and caches of keys and values.

    Args:
        path: the file, for messages.
        archive: the archive.
        records: the names of its files by their place in it.

    Returns:
        The classes of caches, which torch does not take for harmless by itself.

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
            found = None if match is None else getattr(_module(match[1]), match[2], None)
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


def _module(name: str) -> object:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
