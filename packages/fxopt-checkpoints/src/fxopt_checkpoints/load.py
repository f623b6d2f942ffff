"""Loading checkpoints of the original model into a rewritten one, and saving under the original keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxopt_checkpoints._torch import IncompatibleKeys
from fxopt_checkpoints.arithmetic import Computed, NewTensors, OriginalTensors, present_devices, present_dtypes
from fxopt_checkpoints.key_map import KeyMap
from fxopt_checkpoints.rollback import Rollback
from fxopt_checkpoints.sharding import is_sharded, write
from fxopt_checkpoints.tensor_map import OriginalTensor, region
from fxopt_checkpoints.trace import is_baked, key_map
from fxopt_checkpoints.validation import Validation, copying_problem
from fxopt_core import check_graph_module, type_text
from fxopt_core.errors import CheckpointError


def load_original_state_dict(
    graph_module: GraphModule, state_dict: Mapping[str, Any], strict: bool = True, *, protect_values: bool = True
) -> IncompatibleKeys:
    """Load a checkpoint of the original model into a rewritten one.

    The result is the same, bit for bit, as loading it into the original model (in the present dtype, on the present
    device) and then applying the passes. Values are written in place, tensor by tensor; folded weights are computed.

    Args:
        graph_module: the rewritten module.
        state_dict: the checkpoint, under the keys of the original model. One of several tied keys is enough.
        strict: whether the keys have to be exactly those of the original model. Otherwise whatever is given is loaded:
            single slices of merged tensors, but folds only if all of their inputs are given, since the former values of
            the others are no longer known.
        protect_values: whether overwritten values are kept in CPU memory until everything is written, so that nothing
            is loaded after an interrupt or an error of a hook either.

    Returns:
        The missing and the unexpected keys of the original model, as in torch.

    Raises:
        CheckpointError: Keys are missing or unexpected, values are not tensors or have wrong shapes, tied keys differ,
            folded weights would not be finite, or a module would load its part by code of its own: by hooks, extra
            state, or for tensors of unusual kinds. The message names all problems, and nothing is loaded.
        FxoptError: See `key_map`.

    >>> from torch import nn
    >>> graph_module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3)))
    >>> load_original_state_dict(graph_module, nn.Sequential(nn.Linear(2, 3)).state_dict())
    <All keys matched successfully>
    """
    check_graph_module(graph_module, "load_original_state_dict")
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(
            f"load_original_state_dict is given {type_text(state_dict)}, expected a state_dict: a mapping of "
            "names to tensors"
        )
    graph_module.state_dict()  # whose hooks free what FSDP2 gathered for a forward
    names, current = key_map(graph_module), current_tensors(graph_module)
    validation = Validation(names, dict(state_dict), getattr(state_dict, "_metadata", None))
    rollback, devices = Rollback(protect_values), {key: tensor.device for key, tensor in current.items()}
    loading = Loading(graph_module, validation, rollback, current, devices)
    validation.check(graph_module)
    loading.rehearse(strict)
    validation.raise_error(strict, current)
    try:
        return loading.load()
    except BaseException:
        rollback.run()
        raise


class Loading:
    """Puts the tensors of a checkpoint into their places.

    Args:
        graph_module: the rewritten module.
        validation: the checkpoint.
        rollback: takes back what is written.
        current: the tensors of the module by name, as they are when `load` is called.
        devices: the devices that these have then, by name.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        validation: Validation,
        rollback: Rollback,
        current: Mapping[str, Tensor],
        devices: Mapping[str, torch.device],
    ) -> None:
        self.graph_module, self.validation, self.rollback = graph_module, validation, rollback
        self.current, self.names = current, validation.names
        self.dtypes, self.devices = present_dtypes(self.names, current), present_devices(self.names, devices)

    def prepare(self, label: str, values: Tensor) -> Tensor:
        """Cast an argument of a function as loading it into the original model would."""
        # Sums of a matrix product may depend on strides.
        return values.to(self.devices[label], self.dtypes[label]).contiguous()

    def rehearse(self, strict: bool) -> None:
        """Find everything that would go wrong, without changing anything."""
        for key, values in self.validation.given.items():
            if self.names.by_key[key].kept:
                problem = copying_problem(values, self.current[key])
                self.validation.problems += [f"`{key}` {problem}"] if problem else []
        self.validation.rehearse(self.prepare, strict, self._writing_problem)

    def _writing_problem(self, computed: Computed) -> str | None:
        target = self.current[computed.target.name]
        whole = is_sharded(target)  # a region of it would be gathered
        parts = ((values, target if whole else region(target, pieces)) for pieces, values in computed.parts)
        return next(filter(None, (copying_problem(values, place) for values, place in parts)), None)

    def load(self) -> IncompatibleKeys:
        """Write everything, and run the hooks that torch runs then."""
        written: set[str] = set()
        for key in self.validation.given:
            source = self.names.source_of(key)
            if self.names.by_key[key].kept and source not in written:
                written.add(source)
                self.rollback.keep(self.current[key])
                write(key, self.current[key], (), self.validation.read(key))
        for computed in NewTensors(self.names, self.validation.values_of, self.prepare):
            target = self.current[computed.target.name]
            self.rollback.keep(target)
            computed.write(target.detach())
        result = IncompatibleKeys(self.validation.missing, self.validation.unexpected)
        for module in self.graph_module.modules():
            for hook in module._load_state_dict_post_hooks.values():
                hook(module, result)
        return result


def current_tensors(graph_module: GraphModule) -> dict[str, Tensor]:
    """Return all parameters and buffers by full name, tied ones under each of their names."""
    parameters: dict[str, Tensor] = dict(graph_module.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(graph_module.named_buffers(remove_duplicate=False))}


def original_state_dict(graph_module: GraphModule) -> dict[str, Any]:
    """Return the ``state_dict`` that the original model would have: its keys in its order.

    Merged tensors are cut apart again, bit for bit. Folded tensors get values with which the original model computes
    the same: batch norm is the identity, and the layer has the folded weights.

    Args:
        graph_module: the rewritten module.

    Returns:
        Detached tensors. Those that no pass has touched share memory with the module, as in
        ``graph_module.state_dict()``; the others are contiguous copies, each with its own memory, so that safetensors
        accepts them. Tied keys give one tensor; batch counters that a fold dropped are zero.

    Raises:
        NotReversibleError: Some original values cannot be restored; the message names each site. It is also a
            CheckpointError if the inverse function of a pass is wrong: it omits a tensor, or the present values cannot
            be computed from its results, up to rounding.
        FxoptError: See `key_map`.

    >>> list(original_state_dict(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 3)))))
    ['0.weight', '0.bias']
    """
    check_graph_module(graph_module, "original_state_dict")
    saved: dict[str, Any] = graph_module.state_dict()  # first: its hooks free what FSDP2 gathered for a forward
    names = key_map(graph_module)
    current = current_tensors(graph_module)
    taken = OriginalTensors(names, current, present_dtypes(names, current))
    rows = [row for row in names.originals if row.in_state_dict]
    # What cannot be restored is among the problems already; `unsaved` would name it again.
    error = taken.error([] if taken.problems else unsaved(names, saved, current, taken.has))
    if error is not None:
        raise error
    made = {target.name for target in names.new_tensors}
    result = in_order(rows, saved, made)
    copies: dict[str, Tensor] = {}
    for row in rows:
        if not row.kept and row.key in result:
            source = names.source_of(row.key)
            if source not in copies:
                copies[source] = taken.copy_of(row)
            result[row.key] = copies[source]
    metadata: dict[str, Any] | None = getattr(saved, "_metadata", None)
    if metadata is not None:
        gone = {key.rpartition(".")[0] for key in made}
        vars(result)["_metadata"] = {name: entry for name, entry in metadata.items() if name not in gone}
    return result


def unsaved(
    names: KeyMap, saved: Mapping[str, Any], current: Mapping[str, Tensor], has: Callable[[OriginalTensor], bool]
) -> list[str]:
    """Describe original values that nothing holds, by ``has``, and tensors in ``saved`` of unknown origin."""
    lost = [
        f"`{row.key}` was removed, and nothing holds its values; keep the original checkpoint"
        for row in names.originals
        if row.in_state_dict
        and not row.kept
        and row.shape is not None
        and not has(row)
        # Batch norms count again from zero.
        and not row.key.endswith("num_batches_tracked")
    ]
    known = {target.name for target in names.new_tensors} | names.by_key.keys()
    return lost + [
        f"`{key}` was put in by a pass that does not say what it is made of (by `Editor.drop`, `Editor.neutral` or "
        "`Editor.derived`); save graph_module.state_dict()"
        for key in saved
        if key in current and key not in known and not is_baked(key)
    ]


def in_order(rows: list[OriginalTensor], saved: Mapping[str, Any], made: set[str]) -> OrderedDict[str, Any]:
    """Return the present entries with places for the originals, followed by those that hooks add."""
    # As in torch, an OrderedDict: a plain dict could not have the attribute _metadata.
    result = OrderedDict((row.key, saved.get(row.key)) for row in rows if not row.kept or row.key in saved)
    added = [key for key in saved if key not in result and key not in made and not is_baked(key)]
    return OrderedDict({**result, **{key: saved[key] for key in added}})
