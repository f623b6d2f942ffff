"""Checkpoints of the original model, in a rewritten one: load them, and save under the original keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.modules.module import _IncompatibleKeys

from fxopt_core.checkpoint_checks import Checked, copying_problem, range_problem, unreachable
from fxopt_core.checks import check_graph_module
from fxopt_core.errors import CheckpointError, NotReversibleError
from fxopt_core.key_arithmetic import Computed, NewTensors, OriginalTensors, present_devices, present_dtypes, region
from fxopt_core.key_map import Derivation, KeyMap, OriginalTensor
from fxopt_core.key_tracing import key_map
from fxopt_core.key_tree import is_baked
from fxopt_core.overwriting import Overwriting
from fxopt_core.self_loading import SelfLoading


def load_original_state_dict(
    graph_module: GraphModule,
    state_dict: Mapping[str, Any],
    strict: bool = True,
    assign: bool = False,
    *,
    protect_values: bool = True,
) -> _IncompatibleKeys:
    """Load a checkpoint of the original model into a rewritten one.

    The result is that of loading it into the original model as it would be now (same dtype, same device) and applying
    the passes then, bit for bit. Values are written in place, one tensor after the other; folded weights are computed.

    Args:
        graph_module: the rewritten module.
        state_dict: the checkpoint, under the keys of the original model. Of tied keys, one is enough.
        strict: whether the keys have to be those of the original model exactly. Otherwise what is there is loaded: of a
            merged tensor, the slices that are given; a fold only where all that goes into it is given, since what the
            original model would go on using for the rest is not known any more.
        assign: as in torch, whether the tensors of the checkpoint take the place of those of the module, with their own
            dtype and device, instead of being copied into them. Needed where the module is on the meta device.
        protect_values: whether the former values of what is overwritten are kept in CPU memory until all is written, so
            that an interrupt, or an error of a hook, leaves nothing loaded either. With ``assign``, nothing has to be
            copied for that.

    Returns:
        The original keys that are missing, and those that are not of the original model, as in torch.

    Raises:
        CheckpointError: Keys are missing or unexpected, values are no tensors or have wrong shapes, tied keys differ,
            or folded weights would not be finite. All is named at once, and nothing is loaded.
        FxoptError: See `key_map`.

    >>> graph_module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3)))
    >>> load_original_state_dict(graph_module, nn.Sequential(nn.Linear(2, 3)).state_dict())
    <All keys matched successfully>
    """
    check_graph_module(graph_module, "load_original_state_dict")
    _check_mapping(state_dict)
    names = key_map(graph_module)
    metadata: Mapping[str, Any] | None = getattr(state_dict, "_metadata", None)
    working = dict(state_dict)
    checked, own = Checked(names, working, metadata), SelfLoading(graph_module)
    writes = Overwriting(protect_values)
    loading = _Loading(graph_module, names, checked, assign, writes)
    try:
        own.load(working, metadata, assign)
        checked.check(own)
        loading.rehearse(strict)
        error = checked.error(strict, loading.current)
        if error is not None:
            raise error
        loading.load(own)
        result = _IncompatibleKeys(checked.missing, checked.unexpected)
        _run_hooks(graph_module, result)
    except BaseException:
        writes.take_back()
        own.take_back()
        raise
    return result


def _check_mapping(state_dict: object) -> None:
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(
            f"load_original_state_dict is given a {type(state_dict).__name__}, expected a state_dict: a mapping of "
            "names to tensors"
        )


def _run_hooks(graph_module: GraphModule, result: _IncompatibleKeys) -> None:
    """Run the hooks that torch runs when a state_dict has been loaded."""
    for module in graph_module.modules():
        for hook in module._load_state_dict_post_hooks.values():
            hook(module, result)


class _Loading:
    """Puts the tensors of a checkpoint where they belong."""

    def __init__(
        self, graph_module: GraphModule, names: KeyMap, checked: Checked, assign: bool, writes: Overwriting
    ) -> None:
        self.graph_module, self.names, self.checked, self.assign = graph_module, names, checked, assign
        self.writes = writes
        self.current = current_tensors(graph_module)
        self.dtypes = present_dtypes(names, self.current)
        self.devices = present_devices(names, self.current)

    def _original(self, key: str) -> Tensor | None:
        group = self.names.aliases.get(key, (key,))
        return next((self.checked.given[name] for name in group if name in self.checked.given), None)

    def _prepare(self, label: str, values: Tensor) -> Tensor:
        """Cast what a function reads as loading it into the original model would."""
        if self.assign:
            return values
        # Sums of a matrix product may depend on strides.
        return values.to(self.devices[label], self.dtypes[label]).contiguous()

    def rehearse(self, strict: bool) -> None:
        """Find what would go wrong, and change nothing."""
        problems = self.checked.problems
        for key, values in self.checked.given.items():
            if self.names.by_key[key].kept:
                problem = copying_problem(values, self.current[key], self.assign)
                problems += [f"`{key}` {problem}"] if problem else []
        done = set()
        for computed in NewTensors(self.names, self._original, self._prepare, self._inspect):
            assert computed.target.key is not None
            done.add(computed.target.label)
            problem = self._writing_problem(computed, self.current[computed.target.key])
            problems += [f"`{computed.target.key}` {problem}"] if problem else []
        if strict and not self.checked.missing and not problems:
            problems += unreachable(self.names, done)

    def _inspect(self, step: Derivation, values: Tensor) -> None:
        text = range_problem(step, values)
        if text is not None and text not in self.checked.problems:
            self.checked.problems.append(text)

    def _writing_problem(self, computed: Computed, target: Tensor) -> str | None:
        kinds = {(str(values.dtype), str(values.device)) for _, values in computed.parts}
        if self.assign and len(kinds) > 1:
            found = ", ".join(f"{dtype} on {device}" for dtype, device in sorted(kinds))
            return f"would be put together from tensors of several kinds, {found}: convert them, or load without assign"
        parts = ((values, region(target, pieces)) for pieces, values in computed.parts)
        return next(filter(None, (copying_problem(values, place, self.assign) for values, place in parts)), None)

    def load(self, own: SelfLoading) -> None:
        """Write everything."""
        assigned: dict[str, Tensor] = {}
        for key, values in self.checked.given.items():
            source = self.names.source_of(key)
            if not self.names.by_key[key].kept or own.owns(key):
                continue
            if self.assign:
                self._assign(key, assigned.setdefault(source, self._parameter(key, values)))
            elif source not in assigned:
                assigned[source] = values
                self.writes.keep(self.current[key])
                with torch.no_grad():
                    self.current[key].copy_(values)
        for computed in NewTensors(self.names, self._original, self._prepare):
            assert computed.target.key is not None
            self._write(computed, computed.target.key)

    def _write(self, computed: Computed, key: str) -> None:
        target = self.current[key]
        if not self.assign:
            self.writes.keep(target)
            computed.write(target.detach())
        elif computed.complete:
            self._assign(key, self._parameter(key, computed.build()))
        elif not target.is_meta:
            self._assign(key, self._parameter(key, computed.write(target.detach().clone())))

    def _parameter(self, key: str, values: Tensor) -> Tensor:
        former = self.current[key]
        if values.is_inference() and not torch.is_inference_mode_enabled():
            values = values.clone()  # which may be trained and written
        return nn.Parameter(values, former.requires_grad) if isinstance(former, nn.Parameter) else values

    def _assign(self, key: str, tensor: Tensor) -> None:
        owner, _, name = key.rpartition(".")
        self.writes.replace(self.graph_module.get_submodule(owner), name, tensor)


def current_tensors(graph_module: GraphModule) -> dict[str, Tensor]:
    """Return all parameters and buffers by full name, tied ones under each of their names."""
    parameters: dict[str, Tensor] = dict(graph_module.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(graph_module.named_buffers(remove_duplicate=False))}


def original_state_dict(graph_module: GraphModule) -> dict[str, Any]:
    """Return the ``state_dict`` that the original model would have: its keys in its order.

    What reversible passes merged is cut out again, bit for bit. Of folds, the values are such that the original model
    computes the same: batch norm is the identity, and the layer has the folded weights.

    Args:
        graph_module: the rewritten module.

    Returns:
        Detached tensors. What no pass has touched shares memory with the module, as in ``graph_module.state_dict()``;
        the others are copies, contiguous and each with its own memory, so that safetensors takes them. Tied keys give
        one tensor; counters of batches that a fold dropped are zero.

    Raises:
        NotReversibleError: Some original values cannot be told: each site is named.
        FxoptError: See `key_map`.

    >>> list(original_state_dict(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3)))))
    ['0.weight', '0.bias']
    """
    check_graph_module(graph_module, "original_state_dict")
    names = key_map(graph_module)
    current = current_tensors(graph_module)
    taken = OriginalTensors(names, current, present_dtypes(names, current))
    values = taken.run()
    rows = [row for row in names.originals if row.in_state_dict]
    problems = list(taken.problems) or [p for p in (_loss(row, names, values, taken) for row in rows) if p]
    if problems:
        text = "\n  ".join(problems)
        raise NotReversibleError(
            f"the values of the original model cannot be told:\n  {text}", pass_name=taken.pass_name
        )
    saved: dict[str, Any] = graph_module.state_dict()
    made = {target.key for target in names.new_tensors}
    result = _in_order(rows, saved, made)
    copies: dict[str, Tensor] = {}
    for row in rows:
        if not row.kept and row.key in result:
            source = names.source_of(row.key)
            if source not in copies:
                copies[source] = _copy(values.pop(source)) if source in values else _zeros(row, taken)
            result[row.key] = copies[source]
    metadata: dict[str, Any] | None = getattr(saved, "_metadata", None)
    if metadata is not None:
        gone = {key.rpartition(".")[0] for key in made if key is not None}
        vars(result)["_metadata"] = {name: entry for name, entry in metadata.items() if name not in gone}
    return result


def _loss(row: OriginalTensor, names: KeyMap, values: Mapping[str, Tensor], taken: OriginalTensors) -> str | None:
    """Say that the values of an original tensor are not kept, where that is so."""
    counts = row.dtype is not None and not (row.dtype.is_floating_point or row.dtype.is_complex)
    dropped = row.beside is not None and counts
    if row.kept or row.shape is None or names.source_of(row.key) in values or dropped:
        return None
    return f"`{row.key}` was taken out, and nothing holds its values; keep the original checkpoint"


def _in_order(rows: list[OriginalTensor], saved: Mapping[str, Any], made: set[str | None]) -> OrderedDict[str, Any]:
    """Return what is saved now with places for the originals; keys that hooks add stay behind those before them."""
    originals = {row.key for row in rows}
    behind: dict[str, list[str]] = {}
    previous = ""
    for key in saved:
        if key in originals:
            previous = key
        elif key not in made and not is_baked(key):
            behind.setdefault(previous, []).append(key)
    result: OrderedDict[str, Any] = OrderedDict((key, saved[key]) for key in behind.get("", ()))
    for row in rows:
        if not row.kept or row.key in saved:
            result[row.key] = saved.get(row.key)
        for key in behind.get(row.key, ()):
            result[key] = saved[key]
    return result


def _copy(values: Tensor) -> Tensor:
    return values.new_empty(values.shape).copy_(values)


def _zeros(row: OriginalTensor, taken: OriginalTensors) -> Tensor:
    device = taken.devices.get(row.beside) if row.beside is not None else None
    return torch.zeros(row.shape or (), dtype=row.dtype, device=device)
