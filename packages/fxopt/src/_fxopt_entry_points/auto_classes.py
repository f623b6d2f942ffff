"""How ``AutoConfig`` and ``AutoModel...`` of transformers open a folder that fxopt wrote.

`autoload` imports this in every process that has these classes; the first archive imports the code that opens it.
"""

from __future__ import annotations

import importlib
import os
import re
from typing import Any, ClassVar

MODEL_TYPE = "fxopt (pip install fxopt)"  # as fxopt_capture.huggingface.folders has it, which is not imported here
#: Arguments of `from_pretrained` that say where a file is; transformers hands them on to `cached_file`.
_OF_THE_HUB = {"cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token"}
#: Options that were decided when the model was captured, and are part of the graph.
_DECIDED = ("attn_implementation", "device_map", "quantization_config")


class Opener:
    """Stands for a class of models; it opens folders as captured modules."""

    config_class: ClassVar[Any]
    auto_class: ClassVar[Any]

    @classmethod
    def from_pretrained(cls, path: str, *_: object, config: Any, **kwargs: Any) -> Any:
        """Return the graph module of a folder, or of a repository on the hub.

        Raises:
            ValueError: The model in it has another head, or options are given that were decided when it was optimized.
        """
        own, (head, *others) = getattr(config, "fxopt", None), getattr(config, "architectures", None) or [""]
        keys = ("archive", "dtype", "model_type")
        if not isinstance(own, dict) or not all(isinstance(own.get(key), str) for key in keys) or others:
            raise ValueError(f"the config.json of {path} has an entry of fxopt, but not in the form that fxopt writes")
        if not _fits(head, own["model_type"], cls.auto_class):
            name = cls.auto_class.__name__
            raise ValueError(f"{path} holds a {head}, which {name} does not open: optimize the model that you need")
        given = [name for name in _DECIDED if kwargs.get(name) is not None]
        dtype = kwargs.get("dtype") or kwargs.get("torch_dtype") or "auto"
        if dtype != "auto" and _name(dtype) != own["dtype"]:
            given.append(f"dtype={_name(dtype)}")
        if given:
            raise ValueError(f"{path} holds an optimized graph, and {', '.join(given)} can no longer be chosen")
        hub = {name: value for name, value in kwargs.items() if name in _OF_THE_HUB}
        cached_file = importlib.import_module("transformers.utils").cached_file
        # Only the name of the file: a stranger's config.json may give a path to somewhere else.
        archive = cached_file(path, os.path.basename(own["archive"]), **hub)
        model = importlib.import_module("fxopt_capture").load(archive)
        model.meta["pretrained"] = {**model.meta["pretrained"], "name_or_path": path}  # which archives do not hold
        return model


def register() -> None:
    """Let transformers open the folders that fxopt writes."""
    transformers = importlib.import_module("transformers")
    config_class = type("FxoptConfig", (transformers.PreTrainedConfig,), {"model_type": MODEL_TYPE})
    transformers.AutoConfig.register(MODEL_TYPE, config_class, exist_ok=True)
    modeling_auto = importlib.import_module("transformers.models.auto.modeling_auto")
    for auto_class in [getattr(modeling_auto, name) for name in modeling_auto.__all__ if name.startswith("AutoModel")]:
        # One class for each, because transformers does not tell a class by which `AutoModel...` it is opened.
        opener = type("Opener", (Opener,), {"auto_class": auto_class, "config_class": config_class})
        auto_class.register(config_class, opener, exist_ok=True)


def _fits(name: str, model_type: str, auto_class: Any) -> bool:
    """Whether a class ``AutoModel...`` opens models of a class."""
    transformers = importlib.import_module("transformers")
    if auto_class is transformers.AutoModel:  # the encoder of an encoder-decoder model is in no mapping
        # Names of classes with a head: `BertForMaskedLM`, `GPT2LMHeadModel`.
        return re.search("For[A-Z]|LMHead", name) is None
    known = model_type in transformers.CONFIG_MAPPING
    found = auto_class._model_mapping.get(transformers.CONFIG_MAPPING[model_type], ()) if known else ()
    return name in [each.__name__ for each in (found if isinstance(found, list | tuple) else (found,))]


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
