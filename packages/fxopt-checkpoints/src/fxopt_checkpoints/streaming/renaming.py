"""Names of tensors in checkpoints that differ from those in the model.

The code that makes a graph module notes them there, as plain data::

    graph_module.meta["checkpoint_names"] = {"renamed": {"layer.w": "layer.weight"}, "converted": ["head.weight"]}

`renamed` has the names in the model by those in checkpoints. `converted` has the names in the model of tensors that the
model's library computes from others when it loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch.fx import GraphModule

from fxopt_checkpoints.streaming.files import StoredTensor
from fxopt_core.errors import CheckpointError

_KEY = "checkpoint_names"


def renaming(
    graph_module: GraphModule, rename: Mapping[str, str] | Callable[[str], str | None] | None
) -> Callable[[str], str | None]:
    """Return a function from names in a checkpoint to those in the model, given by the caller or by the note."""
    if callable(rename):
        return rename
    known = graph_module.meta.get(_KEY, {}).get("renamed", {}) if rename is None else rename
    return lambda stored: known.get(stored, stored)


def renamed(stored: Mapping[str, StoredTensor], name_in_model: Callable[[str], str | None]) -> dict[str, StoredTensor]:
    """Return stored tensors by their names in the model, without those that have none.

    Raises:
        CheckpointError: Two of them would have the same name.
    """
    found: dict[str, StoredTensor] = {}
    for key, each in stored.items():
        name = name_in_model(key)
        if name is None:
            continue
        if name in found:
            both = f"`{found[name].key}` in `{found[name].file}` and `{key}` in `{each.file}`"
            raise CheckpointError(f"{both} would both be `{name}` in the model: rename or leave out one of them")
        found[name] = each
    return found


def converted_names(graph_module: GraphModule) -> set[str]:
    """Return the names in the model of tensors that checkpoints hold in another form."""
    return set(graph_module.meta.get(_KEY, {}).get("converted", ()))
