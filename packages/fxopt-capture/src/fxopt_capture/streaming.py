"""`load_checkpoint`: safetensors checkpoints of the original model, read right into a rewritten one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.modules.module import _IncompatibleKeys

from fxopt_core.checkpoint_checks import range_problem
from fxopt_core.checks import check_graph_module
from fxopt_core.garbage import collector_paused
from fxopt_core.key_arithmetic import NewTensors, Pieces, present_devices, present_dtypes, region
from fxopt_core.key_map import Derivation, KeyMap
from fxopt_core.overwriting import Overwriting

from .checkpoint_files import renamed, stored_tensors
from .fitting import Fitted, fitted
from .guards import InputGuards
from .placement import Placement
from .safetensors_files import Reader, StoredTensor
from .stored_names import renaming


def load_checkpoint(
    graph_module: GraphModule,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    protect_values: bool = True,
    rename: Mapping[str, str] | Callable[[str], str | None] | None = None,
) -> _IncompatibleKeys:
    """Load a safetensors checkpoint of the original model into a rewritten one, and read each tensor to its place.

    The result is that of loading it into the original model and applying the passes then, bit for bit. But nothing is
    held besides the rewritten model: of a merged weight, the parts are read into its rows, and a fold is computed from
    the few tensors that go into it. So it is for models that are made, captured and rewritten on the meta device.

    Args:
        graph_module: the rewritten module, on the meta device or not, or partly.
        path: a ``.safetensors`` file, the index of a sharded checkpoint (``model.safetensors.index.json``), or a folder
            that has either, as ``save_pretrained`` writes it.
        strict: whether the keys have to be those of the original model exactly, and nothing may be left on the meta
            device. Otherwise what is there is loaded; tensors on the meta device stay there unless all of their parts
            are given. See `load_original_state_dict`.
        device: where all is to be afterwards. None: tensors stay where they are, and those on the meta device come to
            where the graph was captured for, which is the CPU if that is not known.
        dtype: what all floating-point tensors become, as by ``graph_module.to(dtype)``. None: what is read is cast to
            the dtypes that the module has.
        protect_values: whether the former values of what is written in place are kept in CPU memory until all is read,
            so that an error leaves nothing loaded then either. What is on the meta device needs no copy.
        rename: a mapping, or a function, from names in the checkpoint to those in the original model, None for what is
            to be passed over. None: the names that `capture` has learnt from transformers, which renames the tensors of
            some models when it saves them.

    Returns:
        As in torch: the original keys that are missing, and those that are not of the original model.

    Raises:
        CheckpointError: There is no checkpoint; a file is damaged, truncated, or none in this format; the index
            contradicts its shards; tensors are missing or unexpected, or have other shapes or kinds of dtype; folded
            weights would not be finite; reading fails. Tensors and files are named, and nothing is loaded.
        FxoptError: See `key_map`.

    >>> import safetensors.torch, tempfile
    >>> graph_module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3, device="meta")))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model = nn.Sequential(nn.Linear(2, 3))
    ...     safetensors.torch.save_file(model.state_dict(), f"{folder}/model.safetensors")
    ...     load_checkpoint(graph_module, folder)
    <All keys matched successfully>
    """
    check_graph_module(graph_module, "load_checkpoint")
    stored = renamed(stored_tensors(path), renaming(graph_module, rename))
    with collector_paused(), Reader() as reader:
        placement = Placement(graph_module, device, dtype)
        found = fitted(placement, stored, reader, path, strict=strict)
        loading = _Loading(placement, found, reader, Overwriting(protect_values))
        return loading.run(strict)


@dataclass(frozen=True)
class _Part:
    """Values for a region of a tensor: read from a file, or computed."""

    pieces: Pieces
    values: StoredTensor | Tensor


class _Loading:
    """Reads the tensors of a checkpoint to their places."""

    def __init__(self, placement: Placement, found: Fitted, reader: Reader, writes: Overwriting) -> None:
        self.placement, self.found, self.reader, self.writes = placement, found, reader, writes
        self.names: KeyMap = placement.names
        self.dtypes = present_dtypes(self.names, placement.wanted)
        self.devices = present_devices(self.names, placement.wanted)
        self.done: set[int] = set()

    def run(self, strict: bool) -> _IncompatibleKeys:
        """Read everything, or nothing."""
        self.rehearse(strict)
        module = self.placement.graph_module
        dtypes = [(each, each.module_dtype) for each in module.modules() if isinstance(each, InputGuards)]
        try:
            self._load()
            for guards, former in dtypes:
                guards.module_dtype = former and (self.placement.dtype or former)
            result = _IncompatibleKeys(self.found.missing, self.found.unexpected)
            for each in module.modules():
                for hook in each._load_state_dict_post_hooks.values():
                    hook(each, result)
        except BaseException:
            self.writes.take_back()
            for guards, former in dtypes:
                guards.module_dtype = former
            raise
        return result

    def rehearse(self, strict: bool) -> None:
        """Compute the folds, and change nothing."""
        problems: list[str] = []

        def inspect(step: Derivation, values: Tensor) -> None:
            text = range_problem(step, values)
            if text is not None and text not in problems:
                problems.append(text)

        done = {computed.target.label for computed in self._new_tensors(inspect)}
        self.found.check_folds(problems, done, strict)

    def _new_tensors(self, inspect: Any = lambda step, values: None) -> NewTensors:
        return NewTensors(self.names, self.found.stand_in, self._prepare, inspect)

    def _prepare(self, label: str, values: Tensor) -> Tensor:
        """Read what a function computes with, cast as loading it into the original model would."""
        stored = self.found.stored_for(values)
        read = values if stored is None else self.reader.read(stored).reshape(values.shape)
        return read.to(self.devices[label], self.dtypes[label]).contiguous()

    def _load(self) -> None:
        for key, values in self.found.given.items():
            stored = self.found.stored_for(values)
            if self.names.by_key[key].kept and stored is not None:
                self._put(key, [_Part((), stored)], {}, complete=True)
        for computed in self._new_tensors():
            assert computed.target.key is not None
            parts = [_Part(pieces, self.found.stored_for(values) or values) for pieces, values in computed.parts]
            self._put(computed.target.key, parts, dict(computed.fills), complete=computed.complete)
        for key in self.found.counters():
            self._put(key, [], {(): 0.0}, complete=True)
        for key in self.placement.others:
            self._put(key, [], {}, complete=False)

    def _put(self, key: str, parts: list[_Part], fills: Mapping[Pieces, float], *, complete: bool) -> None:
        """Write regions of a tensor, or of a new one in its place."""
        former = self.placement.current[key]
        if id(former) in self.done or (former.is_meta and not complete):
            return
        self.done.add(id(former))
        regions = [*(part.pieces for part in parts), *fills]
        covered = sum(region(former, pieces).numel() for pieces in regions)
        target = self.placement.target(key, complete=complete, covered=covered)
        if target is former:
            self.writes.keep(former)
        values = target.detach()
        for part in parts:
            place = region(values, part.pieces)
            if isinstance(part.values, StoredTensor):
                self.reader.read_into(part.values, place)
            else:
                with torch.no_grad():
                    place.copy_(part.values)
        with torch.no_grad():
            for pieces, value in fills.items():
                region(values, pieces).fill_(value)
        self._keep(former, target)

    def _keep(self, former: Tensor, target: Tensor) -> None:
        if target is former:
            if not target.is_inference():
                torch.autograd.graph.increment_version(target)
            return
        if isinstance(former, nn.Parameter):
            target = nn.Parameter(target, requires_grad=former.requires_grad)
        for owner, name in self.placement.owners(former):
            self.writes.replace(owner, name, target)
