"""State dicts for ``torch.distributed.checkpoint`` under the original keys, without gathering a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxopt_checkpoints._torch import make_wrapper
from fxopt_checkpoints.arithmetic import Inputs, NewTensors, OriginalTensors, present_dtypes, trained_stand_in
from fxopt_checkpoints.key_map import KeyMap
from fxopt_checkpoints.load import current_tensors, in_order, unsaved
from fxopt_checkpoints.sharding import LocalRegion, holds_constant, is_sharded, local_region, write
from fxopt_checkpoints.tensor_map import Assembly, Derivation, Destination, OriginalTensor, Step, TensorMap, listed
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
        CheckpointError: Tensors are on the meta device, or sharded in a way that cannot be mapped to the original keys.
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
        self._groups = dict[str, _Group]()  # by the label of an input of a function, or of several tensors
        computed = _computed_steps(names)
        self._refuse_sharded_chains(computed)
        for group in _connected(computed):
            found = _Group(TensorMap(names.originals, group), current)
            self._groups |= dict.fromkeys((source for step in group for source in step.sources), found)
        partial = TensorMap(names.originals, tuple(computed), names.ties)
        taken = OriginalTensors(partial, current, present_dtypes(names, current))

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
        here = [place for place in places if not place.derived]
        if source not in self._groups and len(here) == 1:
            return saved if row.kept else self._part(row, here[0])
        if source in self._groups:
            group = self._groups[source]
            if source not in group.values:
                group.values[source] = saved if row.kept else _like_outputs(taken.copy_of(row), group)
            return _Entry(group.values[source], lambda _: group.loaded(source))
        if not here:  # a counter of batches
            return taken.copy_of(row)
        if any(is_sharded(self._current[place.key]) for place in here):
            raise CheckpointError(
                f"`{row.key}` went to several places, {listed(place.key for place in here)}, and is sharded there: "
                "save graph_module.state_dict()"
            )
        first = here[0].take(self._current[here[0].key].detach())

        def spread(values: Tensor) -> None:
            for place in here[1:]:
                write(place.key, self._current[place.key], place.pieces, values)

        return _Entry(first, spread)

    def _part(self, row: OriginalTensor, place: Destination) -> Tensor:
        whole = self._current[place.key].detach()
        if not is_sharded(whole):
            return place.take(whole)
        return _Part(torch.Size(row.shape or ()), local_region(place.key, whole, place.pieces), row.key)

    def _refuse_sharded_chains(self, steps: list[Step]) -> None:
        for step in steps:
            for target in step.targets if isinstance(step, Assembly) else ():
                places = (place.key for place in self._names.places_of(target))
                if any(key in self._current and is_sharded(self._current[key]) for key in places):
                    raise CheckpointError(
                        f"`{target.name}` is sharded, and was made (pass `{step.pass_name}`) of tensors that a "
                        "function computes or reads: no process can compute its original values by itself. Save "
                        "graph_module.state_dict()"
                    )

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


class _Group:
    """Connected functions, and the values of their inputs."""

    def __init__(self, steps: TensorMap, current: Mapping[str, Tensor]) -> None:
        self.steps, self.current = steps, current
        self.values: dict[str, Tensor] = {}  # by label
        self._loaded: set[str] = set()

    def loaded(self, label: str) -> None:
        """Compute the new tensors again; once all inputs are loaded, check that they are finite."""
        self._loaded.add(label)
        problems: list[str] = []

        def inspect(step: Derivation, inputs: Inputs, results: list[Tensor]) -> None:
            problems.extend(range_problems(step, results))

        complete = self._loaded == self.values.keys()
        new = NewTensors(
            self.steps,
            lambda label: self.values.get(label, self.current.get(label)),
            inspect=inspect if complete else lambda *_: None,
        )
        for computed in new:
            computed.write(self.current[computed.target.name])
        self._loaded = set() if complete else self._loaded
        if problems:
            raise CheckpointError("\n  ".join(["this checkpoint does not fit the rewritten model:", *problems]))


def _computed_steps(names: TensorMap) -> list[Step]:
    """Return the derivations, and the assemblies that are connected with them."""
    wanted: dict[int, Step] = {id(step): step for step in names.steps if isinstance(step, Derivation)}
    found = list(wanted.values())
    labels: set[str] = set()
    while found:
        labels |= {label for step in found for label in (*step.sources, *(target.label for target in step.targets))}
        found = [
            step
            for step in names.assemblies.values()
            if id(step) not in wanted and not labels.isdisjoint((step.target.label, *step.sources))
        ]
        wanted |= {id(step): step for step in found}
    return [step for step in names.steps if id(step) in wanted]


def _connected(steps: list[Step]) -> Iterator[tuple[Step, ...]]:
    """Yield the steps in groups: two that read or make the same tensor are in one."""
    group_of: dict[str, list[Step]] = {}
    for step in steps:
        labels = [*step.sources, *(target.label for target in step.targets)]
        groups = {id(group_of[label]): group_of[label] for label in labels if label in group_of}
        joined = [each for group in groups.values() for each in group] + [step]
        for each in joined:
            group_of |= dict.fromkeys((*each.sources, *(target.label for target in each.targets)), joined)
    order = {id(step): number for number, step in enumerate(steps)}
    for group in {id(group): group for group in group_of.values()}.values():
        yield tuple(sorted(group, key=lambda step: order[id(step)]))


def _like_outputs(values: Tensor, group: _Group) -> Tensor:
    """Return values as a group of sharded tensors needs them: sharded already, or replicated."""
    outputs = [group.current[target.name] for step in group.steps.steps for target in step.targets if target.key]
    sharded = [each for each in outputs if is_sharded(each)]
    if not sharded or is_sharded(values):
        return values
    from torch.distributed.tensor import DTensor, Replicate

    mesh = sharded[0].device_mesh
    return DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)


class _Part(Tensor):
    """An original tensor of which this process holds some rows, inside a sharded merged tensor."""

    _here: LocalRegion
    _key: str

    @staticmethod
    def __new__(cls, shape: torch.Size, here: LocalRegion, key: str) -> _Part:
        values = here.values
        part: _Part = make_wrapper(cls, shape, dtype=values.dtype, device=values.device)
        part._here, part._key = here, key
        return part

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
