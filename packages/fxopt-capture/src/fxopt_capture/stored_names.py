"""What the checkpoints of a Hugging Face model call its tensors, where that is not what the model calls them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import GraphModule

_META_KEY = "fxopt_capture"


@dataclass(frozen=True)
class StoredNames:
    """Names in checkpoints, as data; kept in the ``meta`` of a captured module.

    Attributes:
        renamed: pairs of a name in checkpoints and that in the model.
        converted: names in the model of tensors that transformers computes from others on loading.
    """

    renamed: tuple[tuple[str, str], ...] = ()
    converted: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredNames:
        """Return itself: it is immutable."""
        return self


def keep_stored_names(graph_module: GraphModule, model: nn.Module) -> None:
    """Note in a captured module what checkpoints of its model call its tensors."""
    names = _read(model)
    if names != StoredNames():
        graph_module.meta[_META_KEY] = names


def stored_names_of(graph_module: GraphModule) -> StoredNames:
    """Return what checkpoints of a captured model call its tensors, as far as that is known."""
    found = graph_module.meta.get(_META_KEY)
    return found if isinstance(found, StoredNames) else StoredNames()


def _read(model: Any) -> StoredNames:
    """Ask transformers how it renames on saving; versions that cannot tell rename nothing."""
    try:
        mapping = importlib.import_module("transformers.conversion_mapping")
        loading = importlib.import_module("transformers.core_model_loading")
        rules = mapping.get_model_conversion_mapping(model, add_legacy=False)
        # Prefixes are added and removed by what is in a checkpoint, and not for saving.
        rules = [rule.reverse_transform() for rule in reversed(rules) if not isinstance(rule, loading.PrefixChange)]
        renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
        apply_converters, apply_renamings = loading.apply_converters, loading.apply_renamings
    except (ImportError, AttributeError, ValueError):
        return StoredNames()
    if not rules:
        return StoredNames()
    renamed, converted = [], []
    for key in model.state_dict():
        if apply_converters(key, converters)[1] is not None:
            converted.append(key)
        elif (stored := apply_renamings(key, renamings)) != key:
            renamed.append((stored, key))
    return StoredNames(tuple(renamed), tuple(converted))


def renaming(
    graph_module: GraphModule, rename: Mapping[str, str] | Callable[[str], str | None] | None
) -> Callable[[str], str | None]:
    """Return a function from names in a checkpoint to those in the model.

    Args:
        graph_module: a captured module, which may know of other names.
        rename: what a caller says, which comes first.
    """
    known = dict(stored_names_of(graph_module).renamed)

    def name_in_model(stored: str) -> str | None:
        if rename is None:
            return known.get(stored, stored)
        return rename.get(stored, stored) if isinstance(rename, Mapping) else rename(stored)

    return name_in_model
