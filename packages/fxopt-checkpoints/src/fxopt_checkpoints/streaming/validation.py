"""Whether the tensors in the files of a checkpoint fit a rewritten module, judged by the headers of the files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from fxopt_checkpoints.sharding import is_sharded
from fxopt_checkpoints.streaming.files import StoredTensor
from fxopt_checkpoints.streaming.placement import Placement
from fxopt_checkpoints.streaming.renaming import converted_names
from fxopt_checkpoints.validation import Validation
from fxopt_rewrite import dtype_kind


class StoredValidation(Validation):
    """A `Validation` of tensors in files, by their names in the model; those in `given` are on the meta device."""

    def __init__(self, placement: Placement, stored: Mapping[str, StoredTensor], path: str | os.PathLike[str]) -> None:
        # Set first, because the constructor of the base class names files where tied tensors differ.
        self._placement, self._files, self.where = placement, stored, f"`{path}`: "
        super().__init__(placement.names, {key: each.like for key, each in stored.items()})

    def check(self, module: nn.Module) -> None:
        """Compare kinds of dtype, too, by the headers; refuse sharded modules."""
        super().check(module)
        sharded = (key for key, tensor in self._placement.current.items() if is_sharded(tensor))
        self.problems += [f"`{key}` is sharded: load with distributed_state_dict" for key in sharded]
        for key, values in self.given.items():
            expected = self.names.by_key[key].dtype
            if expected is not None and dtype_kind(expected) != dtype_kind(values.dtype):
                self.problems.append(
                    f"{self._named(key)} is {values.dtype}, expected {dtype_kind(expected)} values, to be {expected}"
                )

    def _advice(self, current: Iterable[str]) -> list[str]:
        lines = super()._advice(current)
        lines += [f"`{key}` is in `{self._files[key].file}`" for key in self.unexpected if key in self._files]
        converted = sorted(converted_names(self._placement.graph_module) & set(self.missing))
        if converted:
            lines.append(
                f"transformers computes `{converted[0]}` from other tensors when it loads this model, which is not "
                "done here: load the original model by from_pretrained, and use load_original_state_dict"
            )
        return lines

    def read(self, key: str) -> Tensor:
        """Return the values given under a key, or under one that is tied to it, in the mapped memory of their file."""
        # A file may hold a number as a tensor of one element; `given` has it in the shape of the model.
        return self._file_of(key).read().reshape(self.given[key].shape)

    def _stored(self, key: str) -> object:
        return self._files[key].read()

    def _named(self, key: str) -> str:
        stored = self._file_of(key)
        return f"`{stored.key}` in `{stored.file}`"

    def _file_of(self, key: str) -> StoredTensor:
        return next(self._files[each] for each in (key, *self.names.aliases.get(key, ())) if each in self._files)

    def left_on_meta(self) -> Iterator[str]:
        """Yield messages about tensors on the meta device that no checkpoint fills."""
        for key, tensor in self._placement.current.items():
            if tensor.is_meta and key not in self._placement.loaded:
                owner, _, name = key.rpartition(".")
                yield (
                    f"`{key}` is not part of a checkpoint, since it is not saved with the model, and it is on the meta "
                    "device, where it holds nothing: give it its values first "
                    f"(graph_module.get_submodule({owner!r}).{name} = ...), or make the model with it elsewhere"
                )
