"""`load_checkpoint`: safetensors checkpoints of the original model, read directly into a rewritten one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from torch.fx import GraphModule

from fxopt_checkpoints._torch import IncompatibleKeys
from fxopt_checkpoints.load import Loading
from fxopt_checkpoints.rollback import Rollback
from fxopt_checkpoints.streaming.files import stored_tensors
from fxopt_checkpoints.streaming.placement import Placement
from fxopt_checkpoints.streaming.renaming import renamed, renaming
from fxopt_checkpoints.streaming.validation import StoredValidation
from fxopt_core import check_graph_module, collector_paused


def load_checkpoint(
    graph_module: GraphModule,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    protect_values: bool = True,
    rename: Mapping[str, str] | Callable[[str], str | None] | None = None,
) -> IncompatibleKeys:
    """Load a safetensors checkpoint of the original model into a rewritten one, each tensor directly to its place.

    The result is the same, bit for bit, as loading it into the original model and then applying the passes. But only
    the rewritten model is held in memory: parts of a merged weight are read into its rows, and a fold is computed from
    its few inputs. So it suits models that are made, captured and rewritten on the meta device.

    Args:
        graph_module: the rewritten module; all, some or none of its tensors may be on the meta device. These move to
            the device that the graph was captured for, or to the CPU if it is not known. Dtypes are those of the
            module: call ``graph_module.to(dtype)`` before, which costs nothing on the meta device.
        path: a ``.safetensors`` file, the index of a sharded checkpoint (``model.safetensors.index.json``), or a folder
            that has either, as ``save_pretrained`` writes it.
        strict: whether the keys have to be exactly those of the original model, and nothing may be left on the meta
            device. Otherwise whatever is given is loaded; tensors on the meta device stay there unless all of their
            parts are given. See `load_original_state_dict`.
        protect_values: whether values that are overwritten in place are kept in CPU memory until everything is read, so
            that nothing is loaded after an error. Tensors on the meta device need no copy.
        rename: a mapping, or a function, from names in the checkpoint to those in the original model, or to None for
            tensors to skip. None: the names in ``graph_module.meta["checkpoint_names"]``, where `capture` notes how
            transformers renames the tensors of some models when it saves them.

    Returns:
        The missing and the unexpected keys of the original model, as in torch.

    Raises:
        CheckpointError: There is no checkpoint; a file is damaged, truncated, or not in this format; the index
            contradicts its shards; tensors are missing or unexpected, or have other shapes or kinds of dtype; folded
            weights would not be finite; reading fails. The message names tensors and files, and nothing is loaded.
        FxoptError: See `key_map`.

    >>> import safetensors.torch, tempfile, torch
    >>> from torch import nn
    >>> graph_module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3, device="meta")))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model = nn.Sequential(nn.Linear(2, 3))
    ...     safetensors.torch.save_file(model.state_dict(), f"{folder}/model.safetensors")
    ...     load_checkpoint(graph_module, folder)
    <All keys matched successfully>
    """
    check_graph_module(graph_module, "load_checkpoint")
    stored = renamed(stored_tensors(path), renaming(graph_module, rename))
    with collector_paused():
        placement, rollback = Placement(graph_module), Rollback(protect_values)
        validation = StoredValidation(placement, stored, path)
        loading = Loading(graph_module, validation, rollback, placement.current, placement.devices)
        validation.check(graph_module)
        validation.problems += validation.left_on_meta() if strict else []
        complete = validation.rehearse(loading.prepare, strict)
        validation.raise_error(strict, placement.current)
        kept = {row.key for row in placement.names.originals if row.kept and row.in_state_dict}
        try:
            placement.make_room(complete | (kept - {*validation.missing}), rollback)
            return loading.load()
        # An interrupt, too, leaves nothing half loaded.
        except BaseException:
            rollback.run()
            raise
