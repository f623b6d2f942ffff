"""Models from a folder in Hugging Face format. Nothing is downloaded, and no code of the folder runs."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from torch import nn

from fxopt.commands.failures import FileError


def from_folder(folder: Path) -> nn.Module:
    """Return the model of a folder with ``config.json`` and weights, of the class that it names, in eval mode.

    Raises:
        FileError: The folder holds no such model, transformers is not installed, or it cannot load the model.
    """
    if not (folder / "config.json").is_file():
        raise FileError(
            f"{folder} has no config.json; expected a folder in Hugging Face format, as save_pretrained writes it"
        )
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise FileError(
            f"loading {folder} needs transformers, which is not installed ({error}): pip install 'fxopt[transformers]'"
        ) from error
    transformers.utils.logging.disable_progress_bar()
    try:
        model: nn.Module = _class_for(folder, transformers).from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever transformers raises for what it cannot load
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise FileError(
            f"transformers cannot load {folder}: {type(error).__name__}: {reason}. A model that comes with code of its "
            "own can be given by a factory: package.module:factory"
        ) from error
    return model.eval()


def _class_for(folder: Path, transformers: Any) -> Any:
    """Return the class that the configuration names, or else the one that transformers chooses."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise FileError(f"{folder / 'config.json'} is no JSON: {error}") from error
    names = config.get("architectures") if isinstance(config, dict) else None
    return getattr(transformers, str(names[0]), transformers.AutoModel) if names else transformers.AutoModel
