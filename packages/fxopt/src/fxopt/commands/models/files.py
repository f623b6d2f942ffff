"""Models in folders in Hugging Face format."""

from __future__ import annotations

import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn
from torch.fx import GraphModule

from fxopt.commands.checks import ARCHIVE
from fxopt.commands.failures import FileError
from fxopt.drop_in.clients import SOUNDS, TEXTS, calls_of, images, sound
from fxopt_capture import load
from fxopt_capture.call.arguments import forward_signature
from fxopt_capture.exporting.failure import first_line
from fxopt_capture.huggingface.dummy_inputs import default_names
from fxopt_tools import Inputs

_OF_SENTENCE_TRANSFORMERS = ("SentenceTransformer", "SparseEncoder", "CrossEncoder")
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")


def opened(folder: Path, taker: nn.Module | None = None) -> tuple[nn.Module, list[Inputs]]:
    """Return the model of a folder, opened as its user opens it, and calls that its tokenizer or processor prepares.

    There are no calls where the folder has neither, or where they do not make all that the model needs.

    Args:
        folder: a folder that `check_sources` let through, or one that fxopt wrote.
        taker: the model that decides which inputs count; by default the one in the folder.

    Raises:
        FileError: The folder holds no such model, or it cannot be loaded.
        PreconditionError: No graph can stand for what is in it.
    """
    if (folder / "modules.json").is_file() and find_spec("sentence_transformers"):
        return _from_library(folder)
    model = load(folder / ARCHIVE) if (folder / ARCHIVE).is_file() else from_folder(folder)
    return model, _prepared_calls(folder, taker or model)


def from_folder(folder: Path) -> nn.Module:
    """Return the model of a folder, of the class that it names, in eval mode.

    Raises:
        FileError: The folder holds no such model, or transformers cannot load it.
    """
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    try:
        # No code of the folder runs; for a model with code of its own there are factories.
        cls = _class_for(folder, transformers)
        model: nn.Module = cls.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except FileError:
        raise
    except Exception as error:  # transformers raises errors of many kinds
        raise FileError(
            f"transformers cannot load {folder}: {type(error).__name__}: {first_line(error)}. A model with code "
            "of its own can be loaded by a factory: package.module:factory"
        ) from error
    return model.eval()


def _from_library(folder: Path) -> tuple[nn.Module, list[Inputs]]:
    """Return the transformer in a folder of sentence-transformers, and calls of it that the library makes."""
    library = importlib.import_module("sentence_transformers")
    library.base.modules.transformer.transformers_logging.disable_progress_bar()
    described = folder / "config_sentence_transformers.json"
    try:
        config = json.loads(described.read_text(encoding="utf-8")) if described.is_file() else {}
        name = config.get("model_type", "SentenceTransformer")
        if name not in _OF_SENTENCE_TRANSFORMERS:
            known = ", ".join(_OF_SENTENCE_TRANSFORMERS)
            raise ValueError(f"{described.name} names the model {name!r}, expected one of {known}")
        client = getattr(library, name)(str(folder), device="cpu", local_files_only=True)
    except Exception as error:  # either library raises errors of many kinds
        raise FileError(
            f"sentence-transformers cannot load {folder}: {type(error).__name__}: {first_line(error)}"
        ) from error
    return calls_of(client.eval())


def _prepared_calls(folder: Path, model: Any) -> list[Inputs]:
    """Return calls of a model that its tokenizer or processor makes of examples, as pipelines make them.

    They hold whatever ``forward`` takes, also what its ``**kwargs`` ignore, as ``token_type_ids`` for DistilBERT.
    """
    main, kind = str(getattr(model, "main_input_name", "")), type(model).__name__
    # Models for multiple choice take (batch, choices, tokens), which a tokenizer does not make of plain texts.
    if main == "input_ids" and not kind.endswith("ForMultipleChoice"):
        tokenizer = loaded("AutoTokenizer", folder)
        usable = tokenizer is not None and tokenizer.pad_token_id is not None
        made = (tokenizer(texts, padding=True, return_tensors="pt") for texts in TEXTS if usable)
    elif main == "pixel_values":
        processor = loaded("AutoImageProcessor", folder)
        made = (processor(batch, return_tensors="pt") for batch in images() if processor is not None)
    elif main == "input_values":
        extractor = loaded("AutoFeatureExtractor", folder)
        rate = getattr(extractor, "sampling_rate", None)
        options = {"sampling_rate": rate, "return_tensors": "pt"}
        options |= {"return_attention_mask": True} if kind.endswith("ForCTC") else {}
        made = (extractor(sound(seconds, rate), **options) for seconds in SOUNDS if rate)
    else:
        return []
    parameters = forward_signature(model).parameters.values()
    names = {parameter.name for parameter in parameters}
    takes_all = isinstance(model, GraphModule) or any(each.kind is each.VAR_KEYWORD for each in parameters)
    try:
        # `made` is lazy, so that errors of tokenizers and processors are raised here.
        calls = [{name: each[name] for name in each if takes_all or name in names} for each in made]
    except Exception:  # a processor may need texts and images together
        return []
    return [Inputs(**call) for call in calls if set(default_names(model)) <= call.keys()]


def loaded(name: str, folder: Path) -> Any:
    """Return a tokenizer or processor of a folder; None where there is none that can be loaded."""
    transformers = importlib.import_module("transformers")
    if name == "AutoTokenizer" and not any(map(any, map(folder.glob, _TOKENIZERS))):
        return None  # transformers would make one without a vocabulary
    try:
        return getattr(transformers, name).from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception:  # transformers raises errors of many kinds; the model can be captured all the same
        return None


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
    raise FileError(
        f"{folder / 'config.json'} names the architecture {name!r}, which is not a model of transformers "
        f"{transformers.__version__}; a model with code of its own can be loaded by a factory: "
        "package.module:factory"
    )
