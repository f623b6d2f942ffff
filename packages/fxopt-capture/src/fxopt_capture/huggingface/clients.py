"""Attributes of Hugging Face models that clients read, on captured models: configuration, device, dtype and others.

They are read from a note of plain data, which copies, pickles and archives keep; transformers is imported when the
configuration is read.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import PurePath
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from fxopt_core.errors import CaptureError

#: The key of the note in ``graph_module.meta``.
NOTE = "pretrained"
# Arguments that a call may repeat as the configuration has them, with their defaults.
_REPEATED = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
_KEYS: Mapping[str, Any] = {
    "attributes": dict,
    "config": dict,
    "config_class": str,
    "generation_config": dict | None,
    "name_or_path": str,
}
#: The most characters that are read as a literal, since a long text of a file could use up memory or the stack.
_LONGEST = 10_000
_UNREADABLE = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)  # what `ast.literal_eval` raises
#: The objects made of notes. They are kept beside the modules, so that copies and pickles hold plain data.
_CONFIGURATIONS: WeakKeyDictionary[GraphModule, dict[str, Any]] = WeakKeyDictionary()


def keep_attributes(graph_module: GraphModule, model: Any) -> None:
    """Note the attributes of a Hugging Face model in its captured module, and give it these attributes."""
    generation = getattr(model, "generation_config", None)
    graph_module.meta[NOTE] = {
        "attributes": {name: repr(value) for name, value in _plain_attributes(model)},
        "config": json.loads(model.config.to_json_string(use_diff=False)),
        "config_class": type(model.config).__name__,
        "generation_config": None if generation is None else json.loads(generation.to_json_string(use_diff=False)),
        "name_or_path": str(model.name_or_path),
    }
    add_attributes(graph_module)


def _plain_attributes(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the attributes of a model and its classes that are plain values, since a library may read any of them.

    Values of the instance that may be paths of this machine are left out.
    """
    of_classes = {name for cls in type(model).__mro__ for name in vars(cls)}
    for name in filter(_may_be_noted, sorted(of_classes | vars(model).keys())):
        with suppress(Exception), warnings.catch_warnings():  # a property may raise anything, or be deprecated
            warnings.simplefilter("ignore")
            value = getattr(model, name)
            text = "" if callable(value) else repr(value)  # the text of a method contains its model
            if (name in of_classes or not set("/\\") & set(text)) and _read(text) == value:
                yield name, value


def _may_be_noted(name: str) -> bool:
    return not name.startswith("__") and name not in _OF_GRAPHS and name not in _ATTRIBUTES


def _read(text: object) -> object:
    """Return the value of an attribute from its text."""
    if not isinstance(text, str) or len(text) > _LONGEST:
        raise ValueError(f"expected a literal of at most {_LONGEST} characters")
    return ast.literal_eval(text)


def note_to_write(note: Any) -> Any:
    """Return the note of a model for a file: paths of folders that it and its parts came from are cut to names."""
    return None if note is None else {**note, "name_or_path": "", "config": _without_folders(note["config"])}


def _without_folders(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without paths of this machine, in its parts either."""
    found = {key: _without_folders(value) if isinstance(value, dict) else value for key, value in config.items()}
    path = PurePath(str(found.get("_name_or_path", "")))
    return {**found, "_name_or_path": path.name} if path.is_absolute() else found


def checked_note(note: Any) -> Mapping[str, Any]:
    """Return a note that was read from a file.

    Raises:
        CaptureError: It is not a valid note.
    """
    if not isinstance(note, dict) or note.keys() != _KEYS.keys():
        raise CaptureError(f"the attributes of a model are {note!r:.80}, expected {', '.join(_KEYS)}")
    for key, kind in _KEYS.items():
        if not isinstance(note[key], kind):
            raise CaptureError(f"the {key} of a model is {note[key]!r:.80}, which is not valid")
    for name, text in note["attributes"].items():
        try:
            _read(text if _may_be_noted(name) else None)
        except _UNREADABLE as error:
            raise CaptureError(f"the attribute {name} of a model is {text!r:.80}, which is not valid") from error
    return dict(note)


def add_attributes(graph_module: GraphModule) -> None:
    """Give a captured module with a note the attributes of its model, on the class that only this module has."""
    if NOTE not in vars(graph_module).get("meta", ()):
        return
    own = {*graph_module._modules, *graph_module._parameters, *graph_module._buffers}
    # Python finds an attribute of the class first, and it would hide a layer or tensor of that name.
    for name in _ATTRIBUTES.keys() - own:
        setattr(type(graph_module), name, _Attribute(name))
    for name, text in graph_module.meta[NOTE]["attributes"].items():
        if name not in own:
            setattr(type(graph_module), name, _read(text))


def is_noted(graph_module: nn.Module, name: str) -> bool:
    """Return whether a captured module has an attribute from its model."""
    note = vars(graph_module).get("meta", {}).get(NOTE)
    return note is not None and (name in _ATTRIBUTES or name in note["attributes"])


def without_defaults(graph_module: GraphModule, kwargs: dict[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call without those that repeat the configuration, unless they are ``known``."""
    repeated = [name for name in kwargs if name in _REPEATED and name not in known]  # written so that dynamo traces it
    if not repeated or NOTE not in graph_module.meta:
        return kwargs
    config = graph_module.meta[NOTE]["config"]
    same = [name for name in repeated if kwargs[name] is config.get(name, _REPEATED[name])]
    return {name: value for name, value in kwargs.items() if name not in same}


class _Attribute:
    """An attribute that is computed unless it has been set."""

    def __init__(self, name: str) -> None:
        self._compute = _ATTRIBUTES[name]

    # There is no ``__set__``, so that a value that a user sets on the module is found before this.
    def __get__(self, instance: GraphModule, owner: type) -> Any:
        return self._compute(instance)


def _configuration(key: str, graph_module: GraphModule) -> Any:
    made = _CONFIGURATIONS.setdefault(graph_module, {})
    if key not in made:
        note = graph_module.meta[NOTE]
        name = note["config_class"] if key == "config" else "GenerationConfig"
        made[key] = None if note[key] is None else _class(name, key == "config").from_dict(note[key])
        if key == "config":
            made[key].name_or_path = note["name_or_path"]
    return made[key]


@cache
def _class(name: str, of_models: bool) -> Any:
    """Return the class of a configuration; the base class for a model's own one, which transformers lacks."""
    transformers = import_module("transformers")
    base = transformers.PreTrainedConfig if of_models else transformers.GenerationConfig
    found = getattr(transformers, name, None)
    # The name may come from a file, so no other kind of class is taken.
    return found if isinstance(found, type) and issubclass(found, base) else base


def _device(graph_module: nn.Module) -> torch.device:
    tensors = (*graph_module.parameters(), *graph_module.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def dtype_of(graph_module: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point tensor, as in transformers."""
    tensors = (*graph_module.parameters(), *graph_module.buffers())
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.get_default_dtype())


def offer(name: str, compute: Callable[[GraphModule], Any]) -> None:
    """Give captured modules with a note one more attribute."""
    _ATTRIBUTES[name] = compute


_ATTRIBUTES: dict[str, Callable[[GraphModule], Any]] = {
    "config": partial(_configuration, "config"),
    "generation_config": partial(_configuration, "generation_config"),
    "name_or_path": lambda graph_module: graph_module.meta[NOTE]["name_or_path"],
    "device": _device,
    "dtype": dtype_of,
    # `transformers.pipeline` asks this, and a graph has no `generate`.
    "can_generate": lambda graph_module: lambda: False,
}
#: Attributes that mean something else on graph modules, and are not replaced by a model's.
_OF_GRAPHS = frozenset(dir(GraphModule)) | vars(GraphModule(nn.Module(), Graph())).keys()
