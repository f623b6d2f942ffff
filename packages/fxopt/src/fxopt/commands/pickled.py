"""Pickled models: opened only by those who say that they want to run the code in them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch
from torch import nn

from fxopt.commands.failures import FileError

FLAG = "--run-pickled-code"
_PROGRAMS = ("models/model.json", "serialized_exported_program.json")


def is_program(path: Path) -> bool:
    """Whether a file is an archive with a program of ``torch.export``."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(_PROGRAMS) for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def from_pickle(path: Path) -> nn.Module:
    """Return the model that ``torch.save(model, path)`` has written. This runs code that the file names.

    Raises:
        FileError: The file holds something else, or cannot be read.
    """
    try:
        found = torch.load(path, weights_only=False, map_location="cpu")
    except Exception as error:  # a pickle may raise anything
        raise FileError(f"{path} cannot be opened by torch.load: {type(error).__name__}: {error}") from error
    if not isinstance(found, nn.Module):
        raise FileError(f"{path} holds a pickled {type(found).__name__}, expected a model: torch.save(model, path)")
    return found
