"""Models in formats of others: pickles, and folders in Hugging Face format."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxopt.commands.failures import FileError
from fxopt.drop_in.clients import TEXTS, calls_of
from fxopt_tools import Inputs

_OF_SENTENCE_TRANSFORMERS = ("SentenceTransformer", "SparseEncoder", "CrossEncoder")
_ARCHIVES = ("models/model.json", "fxopt.json")
# What sentence-transformers loads by these names is what transformers does.
_ENCODERS = frozenset(
    f"{name}Model"
    for name in (
        "Albert", "Bert", "Camembert", "DebertaV2", "DistilBert", "Electra", "MPNet", "ModernBert", "Roberta",
        "XLMRoberta",
    )
)  # fmt: skip
_DESCRIPTIONS = ("modules.json", "config.json", "config_sentence_transformers.json", "sentence_bert_config.json")


def is_program(path: Path) -> bool:
    """Whether a file is an archive, of fxopt or of ``torch.export``."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(_ARCHIVES) for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def from_pickle(path: Path) -> nn.Module:
    """Return a model that ``torch.save(model, path)`` wrote. This runs code that the file names.

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


def from_folder(folder: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """Return the model of a folder that `check_sources` let through, of the class that it names, in eval mode.

    Raises:
        FileError: The folder holds no such model, or transformers cannot load it.
    """
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    model_class = _class_for(folder, transformers)
    try:
        chosen = {} if dtype is None else {"dtype": dtype}
        model: nn.Module = model_class.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, **chosen
        )
    except Exception as error:  # transformers raises errors of many kinds
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise FileError(
            f"transformers cannot load {folder}: {type(error).__name__}: {reason}. A model with code "
            "of its own can be loaded by a factory: package.module:factory"
        ) from error
    return model.eval()


def from_modules(folder: Path, dtype: torch.dtype | None = None) -> tuple[nn.Module, list[Inputs]]:
    """Return the transformer in a folder of sentence-transformers, and calls of it that its tokenizer has prepared.

    A usual encoder of texts is read without that library, which takes more than a second to import.

    Raises:
        FileError: The folder cannot be loaded.
        PreconditionError: No graph can stand for what is in it.
    """
    if (tokenizer := _usual_tokenizer(folder)) is not None:
        model = from_folder(folder, dtype)
        names = inspect.signature(model.forward).parameters
        made = (tokenizer(texts, padding=True, return_tensors="pt") for texts in TEXTS)
        return model, [Inputs(**{name: value for name, value in each.items() if name in names}) for each in made]
    library = importlib.import_module("sentence_transformers")
    library.base.modules.transformer.transformers_logging.disable_progress_bar()
    described = folder / "config_sentence_transformers.json"
    try:
        config = json.loads(described.read_text(encoding="utf-8")) if described.is_file() else {}
        name = config.get("model_type", "SentenceTransformer")
    except (ValueError, RecursionError, AttributeError) as error:
        raise FileError(f"{described} is not as sentence-transformers writes it: {error!r}") from error
    if name not in _OF_SENTENCE_TRANSFORMERS:
        known = ", ".join(_OF_SENTENCE_TRANSFORMERS)
        raise FileError(f"{described} names the model {name!r}, expected one of {known}")
    chosen = {} if dtype is None else {"dtype": dtype}
    try:
        client = getattr(library, name)(str(folder), device="cpu", local_files_only=True, model_kwargs=chosen)
    except Exception as error:  # either library raises errors of many kinds
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise FileError(f"sentence-transformers cannot load {folder}: {type(error).__name__}: {reason}") from error
    return calls_of(client.eval())


def _usual_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder whose transformer is what its configuration names, called by `forward`, or None.

    What cannot be read is left to sentence-transformers, which says what is wrong.
    """
    try:
        modules, config, client, settings = (
            json.loads((folder / name).read_text(encoding="utf-8")) if (folder / name).is_file() else {}
            for name in _DESCRIPTIONS
        )
        kind, path = modules[0]["type"].split("."), modules[0]["path"]
        if (
            config["architectures"][0] not in _ENCODERS
            or config.get("is_decoder")
            or (kind[0], kind[-1], path) != ("sentence_transformers", "Transformer", "")
            or client.get("model_type", "SentenceTransformer") != "SentenceTransformer"
            or settings.get("transformer_task", "feature-extraction") != "feature-extraction"
            or (folder / "adapter_config.json").exists()
        ):
            return None
        transformers = importlib.import_module("transformers")
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception:  # transformers raises errors of many kinds
        return None


def tokenizer_inputs(folder: Path) -> list[str]:
    """Return the names of what the tokenizer of a folder makes; none where there is no tokenizer that can be loaded."""
    transformers = importlib.import_module("transformers")
    try:
        found = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception:  # transformers raises errors of many kinds; the model can be captured all the same
        return []
    return list(found.model_input_names)


def _class_for(folder: Path, transformers: Any) -> Any:
    """Return the class that the configuration names, or AutoModel where it names none.

    Raises:
        FileError: The configuration names something that is not a model.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = config.get("architectures") if isinstance(config, dict) else None
    if not names:
        return transformers.AutoModel
    name = names[0] if isinstance(names, list) else names
    found = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found
    models = [known for known in dir(transformers) if re.search(r"(Model|LM|For[A-Z]\w+)$", known)]
    close = " or ".join(difflib.get_close_matches(str(name), models))
    hint = f"did you mean {close}? " if close else ""
    raise FileError(
        f"{folder / 'config.json'} names the architecture {name!r}, which is no model of transformers "
        f"{transformers.__version__}; {hint}A model with code of its own can be loaded by a factory: "
        "package.module:factory"
    )
