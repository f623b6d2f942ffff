"""What clients of a Hugging Face model ask it for, on a captured one: its configuration, device, dtype, and the like.

The note that it is read from is plain data, which copies, pickles and archives keep; transformers is imported when the
configuration is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.fx import GraphModule

from fxopt_core.errors import CaptureError

NOTE = "pretrained"
"""The key of the note in ``graph_module.meta``."""
# Arguments that a call may repeat as the configuration has them, with what they are by default.
_REPEATED = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
_KEYS: Mapping[str, Any] = {
    "config": dict,
    "config_class": str,
    "generation_config": dict | None,
    "main_input_name": str,
}
_CONFIGURATIONS: WeakKeyDictionary[GraphModule, dict[str, Any]] = WeakKeyDictionary()


def keep_attributes(graph_module: GraphModule, model: Any) -> None:
    """Note the attributes of a Hugging Face model in its captured module, which has them from now on."""
    generation = getattr(model, "generation_config", None)
    graph_module.meta[NOTE] = {
        "config": json.loads(model.config.to_json_string(use_diff=False)),
        "config_class": type(model.config).__name__,
        "generation_config": None if generation is None else json.loads(generation.to_json_string(use_diff=False)),
        "main_input_name": model.main_input_name,
    }
    add_attributes(graph_module)


def checked_note(note: Any) -> Mapping[str, Any]:
    """Return a note that was read from a file.

    Raises:
        CaptureError: It is none.
    """
    if not isinstance(note, dict) or note.keys() != _KEYS.keys():
        raise CaptureError(f"the attributes of a model are {note!r:.80}, expected {', '.join(_KEYS)}")
    for key, kind in _KEYS.items():
        if not isinstance(note[key], kind):
            raise CaptureError(f"the {key} of a model is {note[key]!r:.80}, which it cannot be")
    return dict(note)


def add_attributes(graph_module: GraphModule) -> None:
    """Give a captured module with a note the attributes of its model; its class is its own."""
    if NOTE not in vars(graph_module).get("meta", ()):
        return
    own = {*graph_module._modules, *graph_module._parameters, *graph_module._buffers}
    for name in _ATTRIBUTES.keys() - own:
        setattr(type(graph_module), name, _Attribute(name))


def without_defaults(graph_module: GraphModule, kwargs: dict[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call without those that repeat the configuration, and are not ``known`` otherwise."""
    repeated = [name for name in kwargs if name in _REPEATED and name not in known]  # in words that dynamo reads
    if not repeated or NOTE not in graph_module.meta:
        return kwargs
    config = graph_module.meta[NOTE]["config"]
    same = [name for name in repeated if kwargs[name] is config.get(name, _REPEATED[name])]
    return {name: value for name, value in kwargs.items() if name not in same}


class _Attribute:
    """An attribute that is computed, and may be set: what is set takes its place."""

    def __init__(self, name: str) -> None:
        self._compute = _ATTRIBUTES[name]

    def __get__(self, instance: GraphModule, owner: type) -> Any:
        return self._compute(instance)


def _configuration(key: str) -> Callable[[GraphModule], Any]:
    def compute(graph_module: GraphModule) -> Any:
        made = _CONFIGURATIONS.setdefault(graph_module, {})
        if key not in made:
            note = graph_module.meta[NOTE]
            name = note["config_class"] if key == "config" else "GenerationConfig"
            made[key] = None if note[key] is None else _class(name, key == "config").from_dict(note[key])
        return made[key]

    return compute


@cache
def _class(name: str, of_models: bool) -> Any:
    """Return the class of a configuration; a model's own one, which transformers does not have, becomes a plain one."""
    transformers = import_module("transformers")
    base = transformers.PreTrainedConfig if of_models else transformers.GenerationConfig
    found = getattr(transformers, name, None)
    return found if isinstance(found, type) and issubclass(found, base) else base


def _device(graph_module: nn.Module) -> torch.device:
    tensors = (*graph_module.parameters(), *graph_module.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def dtype_of(graph_module: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point tensor, as transformers has it."""
    tensors = (*graph_module.parameters(), *graph_module.buffers())
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.get_default_dtype())


def offer(name: str, compute: Callable[[GraphModule], Any]) -> None:
    """Give captured modules with a note one more attribute."""
    _ATTRIBUTES[name] = compute


_ATTRIBUTES: dict[str, Callable[[GraphModule], Any]] = {
    "config": _configuration("config"),
    "generation_config": _configuration("generation_config"),
    "main_input_name": lambda graph_module: graph_module.meta[NOTE]["main_input_name"],
    "device": _device,
    "dtype": dtype_of,
    "can_generate": lambda graph_module: lambda: False,
}
