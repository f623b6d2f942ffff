"""The models of the zoo by name: base models and heads of transformers, one architecture for each module of timm."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import torch
from architectures import randomise_statistics  # of the tests, which are on the path
from torch import nn

from zoo import heads
from zoo.inputs import EXAMPLE, OTHERS, NoInputsError, find_recipe
from zoo.own import FIELDS, INPUTS
from zoo.shrink import nested, small
from zoo.trial import Built

KINDS = ("transformers", "timm", "heads")
_SMALL = (
    "atto",
    "femto",
    "pico",
    "nano",
    "xxs",
    "micro",
    "zepto",
    "xs",
    "tiny",
    "mini",
    "small",
    "lite",
    "s0",
    "b0",
    "m0",
)
_LESS: tuple[Mapping[str, Any], ...] = (
    {"img_size": 64, "depth": 1},
    {"img_size": 64, "depths": (1, 1, 1, 1)},
    {"img_size": 64},
    {"depths": (1, 1, 1, 1)},
    {"layers": (1, 1, 1, 1)},
    {},
)
"""Options that make models of timm smaller, where they take them."""


def names() -> list[str]:
    """Return the names of all models."""
    return [name for kind in KINDS for name in names_of(kind)]


def names_of(kind: str) -> list[str]:
    """Return the names of all models of a kind, such as ``transformers/bert``."""
    if kind == "timm":
        modules = timm().list_modules()
        return [f"timm/{module}" for module in sorted(modules)]
    if kind == "heads":
        return sorted(f"heads/{name}" for name in heads.HEADS)
    mapping = importlib.import_module("transformers.models.auto.modeling_auto").MODEL_MAPPING_NAMES
    return [f"transformers/{name}" for name in sorted(mapping)]


def build(name: str) -> Built:
    """Build a model of the zoo, with an example and other inputs."""
    kind, _, name = name.partition("/")
    torch.manual_seed(0)
    builders = {"timm": _timm, "heads": heads.build, "transformers": _transformers}
    return builders[kind](name)


def _transformers(name: str) -> Built:
    configurations = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    models = importlib.import_module("transformers.models.auto.modeling_auto").MODEL_MAPPING
    kind = configurations[name]
    cls = models[kind]
    return from_config(kind, cls[0] if isinstance(cls, tuple | list) else cls, name)


def from_config(kind: Callable[[], Any], cls: Any, name: str) -> Built:
    """Build a model of a class from a small configuration, as narrow as it can be."""

    def build(config: Any) -> Built:
        model = randomised(cls(config).eval())
        recipe = find_recipe(model, config, INPUTS.get(name))
        if name not in INPUTS and {"input_ids", "pixel_values"} <= inspect.signature(model.forward).parameters.keys():
            with suppress(NoInputsError):
                return heads.with_images(model, config, recipe)
        return Built(model, recipe.make(config, EXAMPLE), [recipe.make(config, size) for size in OTHERS])

    def own_part() -> Any:  # some take the configuration of their decoder
        config = kind()
        return next((part for part in nested(config) if isinstance(part, cls.config_class)), config)

    return small(own_part, build, FIELDS.get(name))


def timm() -> Any:
    """Return timm, which imports torchvision for parts that no model needs."""
    if "timm" not in sys.modules and importlib.util.find_spec("torchvision") is None:
        from stand_ins import stand_in_for

        with stand_in_for("torchvision"):
            library = importlib.import_module("timm")
        _let_transformers_use_it()
        return library
    return importlib.import_module("timm")


def _let_transformers_use_it() -> None:
    """Let transformers find timm, for which it looks once, together with torchvision."""
    utilities: Any = importlib.import_module("transformers.utils.import_utils")
    with patch.object(utilities, "is_torchvision_available", lambda: True):
        utilities.is_timm_available.cache_clear()
        utilities.is_timm_available()


def _timm(module: str) -> Built:
    library = timm()
    listed = sorted(library.list_models(module=module), key=_heaviness)
    failures: list[Exception] = []
    for name in listed[:3]:
        for less in _LESS:
            try:
                model = randomised(library.create_model(name, pretrained=False, num_classes=10, **less).eval())
            except Exception as error:  # what it does not take
                failures.append(error)
                continue
            for size in (64, 128, int(library.get_pretrained_cfg(name).input_size[-1])):
                try:
                    images = [torch.randn(batch, 3, size, size) for batch in (2, 3, 1)]
                    with torch.no_grad():
                        model(images[0])
                except Exception as error:  # of a size that it does not take
                    failures.append(error)
                    continue
                argument = next(iter(inspect.signature(model.forward).parameters))
                example, *others = ({argument: image} for image in images)
                return Built(model, example, others)
    raise failures[-1] if failures else NoInputsError(f"timm lists no model of {module}")


def _heaviness(name: str) -> tuple[int, int]:
    """Return a key that sorts small models first, by their names."""
    words = re.split(r"[_.]", name)
    ranks = [rank for rank, word in enumerate(_SMALL) if word in words]
    return (min(ranks, default=len(_SMALL)), len(name))


def randomised(model: nn.Module) -> nn.Module:
    """Give batch norms statistics that a fold cannot ignore, and constant parameters values that show a mistake."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in randomise_statistics(model).parameters():
            if parameter.is_floating_point() and parameter.dim() == 1 and parameter.numel() > 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.1, 0.1, generator=generator))
    return model
