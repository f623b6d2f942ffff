"""State dicts for ``torch.distributed.checkpoint`` under the original keys, without gathering a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxopt_checkpoints._torch import make_wrapper
from fxopt_checkpoints.arithmetic import NewTensors, OriginalTensors, present_dtypes, trained_stand_in
from fxopt_checkpoints.key_map import KeyMap
from fxopt_checkpoints.load import current_tensors, in_order, unsaved
from fxopt_checkpoints.sharding import LocalRegion, holds_constant, is_sharded, local_region
from fxopt_checkpoints.tensor_map import Derivation, Destination, OriginalTensor, TensorMap, listed
from fxopt_checkpoints.trace import key_map
from fxopt_checkpoints.validation import range_problems
from fxopt_core import check_graph_module
from fxopt_core.errors import CheckpointError


def distributed_state_dict(graph_module: GraphModule) -> dict[str, Any]:
    """Return a state dict for ``torch.distributed.checkpoint``, under the keys of the original model.

    ``dcp.save(state, checkpoint_id=path)`` writes the contents of `original_state_dict`, and ``dcp.load(state,
    checkpoint_id=path)`` reads a checkpoint of the original model into the module; both take ``{"model": state}`` too.
    Each process writes and reads its part of a merged tensor. No tensor is gathered, and only the inputs of folds are
    copied. Saving and loading may use different numbers of processes and forms of the model: plain, rewritten, sharded.

    Args:
        graph_module: the rewritten module: whole, sharded by FSDP2, or under tensor parallelism.

    Returns:
        The module's own tensors, parts of them, and tensors from which others are computed after loading. Make it anew
        for each save or load: an optimizer step may put other tensors into the module.

    Raises:
        CheckpointError: Tensors are on the meta device, or sharded in a way that cannot be mapped to the original keys,
            or a pass has computed them of tensors that other passes made or read.
        NotReversibleError: As in `original_state_dict`.
        FxoptError: See `key_map`.

    >>> list(distributed_state_dict(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 3)))))
    ['0.weight', '0.bias']
    """
    check_graph_module(graph_module, "distributed_state_dict")
    saved: dict[str, Any] = graph_module.state_dict()  # first: its hooks free what FSDP2 gathered for a forward
    names, current = key_map(graph_module), current_tensors(graph_module)
    empty = [key for key in current if current[key].is_meta]
    if empty:
        raise CheckpointError(
            f"{listed(empty[:3])} {'is' if len(empty) == 1 else 'are'} on the meta device and cannot be saved or "
            "loaded in place: call graph_module.to_empty(device=...) first"
        )
    return _Originals(graph_module, names, saved, current)


class _Originals(dict[str, Any]):
    """The tensors of the original model; as a value of another mapping, torch asks it for its ``state_dict``."""

    def __init__(
        self, graph_module: GraphModule, names: KeyMap, saved: Mapping[str, Any], current: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self._names, self._current = names, current
        self._folds = dict[str, _Fold]()  # by the label of an input
        derivations = tuple(step for step in names.steps if isinstance(step, Derivation))
        for step in derivations:
            # torch loads entries one by one, and folds are computed from those: each input has to be an entry.
            alone = all(source in names.by_key and names.consumers[source] == (step,) for source in step.sources)
            if not alone or any(target.key is None for target in step.targets):
                raise CheckpointError(
                    f"{listed(target.name for target in step.targets)} (pass `{step.pass_name}`) are computed of "
                    "tensors that other passes have made or read: let dcp save, or load into, "
                    "state = original_state_dict(graph_module), and then call load_original_state_dict"
                )
            self._folds |= dict.fromkeys(step.sources, _Fold(TensorMap(names.originals, (step,)), current))
        # Without the steps that merge: each process cuts its own part out of a merged tensor.
        derived = TensorMap(names.originals, derivations, names.ties)
        taken = OriginalTensors(derived, current, present_dtypes(names, current))

        def has(row: OriginalTensor) -> bool:
            return taken.has(row) or any(not place.derived for place in names.destinations(row.key))

        error = taken.error([] if taken.problems else [*self._stand_ins(), *unsaved(names, saved, current, has)])
        if error is not None:
            raise error
        rows = [row for row in names.originals if row.in_state_dict]
        self.update(in_order(rows, saved, {target.name for target in names.new_tensors}))
        for row in rows:
            if row.key in self:
                self[row.key] = self._value(graph_module, row, self[row.key], taken)

    def state_dict(self) -> dict[str, Any]:
        """Return the values that torch saves, or loads into."""
        return {key: value.state_dict() if isinstance(value, _Entry) else value for key, value in self.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Use the values that torch has loaded."""
        for key, value in self.items():
            if isinstance(value, _Entry):
                value.load_state_dict(state_dict[key])

    def _value(self, graph_module: GraphModule, row: OriginalTensor, saved: Any, taken: OriginalTensors) -> Any:
        if row.kind == "extra-state":
            return _Entry(saved, graph_module.get_submodule(row.key.rpartition(".")[0]).set_extra_state)
        source, places = self._names.source_of(row.key), self._names.destinations(row.key)
        if source in self._folds:
            return self._folds[source].entry(source, saved if row.kept else taken.copy_of(row))
        if not places:  # a counter of batches
            return taken.copy_of(row)
        if len(places) > 1:
            raise CheckpointError(
                f"`{row.key}` went to several places, {listed(place.key for place in places)}: "
                "save graph_module.state_dict()"
            )
        return saved if row.kept else self._part(row, places[0])

    def _part(self, row: OriginalTensor, place: Destination) -> Tensor:
        whole = self._current[place.key].detach()
        if not is_sharded(whole):
            return place.take(whole)
        return _Part(torch.Size(row.shape or ()), local_region(place.key, whole, place.pieces), row.key)

    def _stand_ins(self) -> Iterator[str]:
        """Yield messages about regions without an original that no longer hold their constants."""
        for step in self._names.assemblies.values():
            for fill in step.fills:
                for place in self._names.places_of(step.target):
                    pieces = (*place.pieces, fill.piece)
                    if not holds_constant(place.key, self._current[place.key].detach(), pieces, fill.value):
                        yield trained_stand_in(step, fill)


class _Entry:
    """A value for which torch reports that it was loaded."""

    def __init__(self, value: Any, loaded: Callable[[Any], None]) -> None:
        self._value, self._loaded = value, loaded

    def state_dict(self) -> Any:
        """Return the value."""
        return self._value

    def load_state_dict(self, value: Any) -> None:
        """Use the loaded value."""
        self._loaded(value)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise CheckpointError(
            "distributed_state_dict is for torch.distributed.checkpoint, by itself or as one value of a mapping: "
            "dcp.save({'model': state}). For other files use original_state_dict"
        )


class _Fold:
    """The inputs of a function that computes tensors of the module."""

    def __init__(self, step: TensorMap, current: Mapping[str, Tensor]) -> None:
        self._step, self._current = step, current
        self._values: dict[str, Tensor] = {}  # by label
        self._loaded: set[str] = set()

    def entry(self, label: str, values: Tensor) -> _Entry:
        """Return an input: sharded or replicated, if the computed tensors are sharded."""
        sharded = [each for target in self._step.new_tensors if is_sharded(each := self._current[target.name])]
        if sharded and not is_sharded(values):
            from torch.distributed.tensor import DTensor, Replicate

            mesh = sharded[0].device_mesh
            # Each process has the same values; checking that they are would take communication.
            values = DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return _Entry(self._values.setdefault(label, values), lambda _: self._compute(label))

    def _compute(self, loaded: str) -> None:
        """Compute the tensors of the module again; once all inputs are loaded, check that they are finite."""
        self._loaded.add(loaded)
        problems: list[str] = []
        new = NewTensors(
            self._step,
            lambda label: self._values.get(label, self._current.get(label)),
            inspect=lambda step, inputs, results: problems.extend(range_problems(step, results)),
        )
        for computed in new:
            computed.write(self._current[computed.target.name])
        if self._loaded == self._values.keys():
            self._loaded.clear()
            if problems:
                raise CheckpointError("\n  ".join(["this checkpoint does not fit the rewritten model:", *problems]))


class _Part(Tensor):
    """An original tensor of which this process holds some rows, inside a sharded merged tensor."""

    # torch's planner asks such a tensor for its chunks. A custom planner would have to be named in every `dcp.save`,
    # and gathering would need the memory that sharding saves.
    _here: LocalRegion
    _key: str

    @staticmethod
    def __new__(cls, shape: torch.Size, here: LocalRegion, key: str) -> _Part:
        values = here.values
        part: _Part = make_wrapper(cls, shape, dtype=values.dtype, device=values.device)
        part._here, part._key = here, key
        return part

    # These three methods are those that DTensor has for torch.distributed.checkpoint.
    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self._here.values)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        here = self._here
        return [ChunkStorageMetadata(torch.Size(here.offsets), here.values.shape)] if here.values.numel() else []

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self._here.values

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types what it has in place of one
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if func not in (aten.detach.default, aten.new_empty.default):  # an asynchronous save fills the latter
            raise NotImplementedError(
                f"{func} on `{args[0]!r}`, which distributed_state_dict made for torch.distributed.checkpoint only"
            )
        part = next(each for each in args if isinstance(each, _Part))
        return _Part(part.shape, part._here, part._key)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's own takes contents to show
        return f"<{tuple(self._here.values.shape)} of `{self._key}`, {tuple(self.shape)}, from {self._here.offsets}>"
