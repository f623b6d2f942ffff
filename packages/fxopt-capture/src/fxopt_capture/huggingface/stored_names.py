"""Names of tensors in the checkpoints of a Hugging Face model that differ from the model's own."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn
from torch.fx import GraphModule


def keep_stored_names(graph_module: GraphModule, model: nn.Module) -> None:
    """Note in a captured module the names of its tensors in checkpoints, for loading these."""
    renamed, converted = _read(model)
    if renamed or converted:
        graph_module.meta["checkpoint_names"] = {"renamed": renamed, "converted": converted}


def _read(model: Any) -> tuple[dict[str, str], list[str]]:
    """Ask transformers which keys it renames or converts on saving; versions that cannot tell rename nothing."""
    try:
        mapping = importlib.import_module("transformers.conversion_mapping")
        loading = importlib.import_module("transformers.core_model_loading")
        rules = mapping.get_model_conversion_mapping(model, add_legacy=False)
        # Prefixes depend on the checkpoint that is loaded, and are not changed on saving.
        rules = [rule.reverse_transform() for rule in reversed(rules) if not isinstance(rule, loading.PrefixChange)]
        renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
        apply_converters, apply_renamings = loading.apply_converters, loading.apply_renamings
    except (ImportError, AttributeError, ValueError):
        return {}, []
    if not rules:
        return {}, []
    renamed, converted = {}, []
    for key in model.state_dict():
        if apply_converters(key, converters)[1] is not None:
            converted.append(key)
        elif (stored := apply_renamings(key, renamings)) != key:
            renamed[stored] = key
    return renamed, converted
