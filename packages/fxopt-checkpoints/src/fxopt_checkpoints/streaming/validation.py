"""Whether the tensors in the files of a checkpoint fit a rewritten module, judged by the headers of the files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fxopt_checkpoints.custom_loading import CustomLoading, has_custom_loading
from fxopt_checkpoints.streaming.files import StoredTensor
from fxopt_checkpoints.streaming.placement import Placement
from fxopt_checkpoints.streaming.renaming import converted_names
from fxopt_checkpoints.validation import Validation
from fxopt_core.errors import CheckpointError
from fxopt_rewrite import dtype_kind

_AT_START = re.compile(r"`([^`]+)`")


class StoredValidation(Validation):
    """A `Validation` of tensors in files, by their names in the model, with meta tensors as stand-ins."""

    def __init__(self, placement: Placement, stored: Mapping[str, StoredTensor], path: str | os.PathLike[str]) -> None:
        super().__init__(placement.names, {key: each.like.detach() for key, each in stored.items()})
        self._placement, self._stored, self._path = placement, stored, path
        self._files: dict[int, StoredTensor] = {}

    def check_headers(self, *, strict: bool) -> None:
        """Find everything that is wrong by the headers; compare values only of tied tensors that are stored repeatedly.

        Raises:
            CheckpointError: The checkpoint does not fit; the message names everything that is wrong.
        """
        self.check(CustomLoading(self._placement.graph_module))
        self.problems[:] = [self._with_file(problem) for problem in self.problems]
        self.problems += self._custom()
        for key, values in self.given.items():
            stored = next(self._stored[k] for k in (key, *self._map.aliases.get(key, ())) if k in self._stored)
            self._files[id(values)] = stored
            expected = self._map.by_key[key].dtype
            if expected is not None and dtype_kind(expected) != dtype_kind(values.dtype):
                self.problems.append(
                    f"`{stored.key}` in `{stored.file}` is {values.dtype}, expected {dtype_kind(expected)} values, to "
                    f"be {expected}"
                )
        if not self.problems:
            self.problems += self._different_ties()
        if strict:
            self.problems += self._left_on_meta()
        self.raise_error(strict)

    def raise_error(self, strict: bool) -> None:
        """Raise an error that names everything that is wrong, if anything is."""
        error = self.error(strict, self._placement.current)
        if error is None:
            return
        where = [f"`{key}` is in `{self._stored[key].file}`" for key in self.unexpected if key in self._stored]
        converted = sorted(converted_names(self._placement.graph_module) & set(self.missing))
        if converted:
            where.append(
                f"transformers computes `{converted[0]}` from other tensors when it loads this model, which is not "
                "done here: load the original model by from_pretrained, and use load_original_state_dict"
            )
        text = "\n  ".join([f"`{self._path}`: {error}", *(where if strict else [])])
        raise CheckpointError(text, missing_keys=self.missing, unexpected_keys=self.unexpected)

    def counters(self) -> list[str]:
        """Return the counters on the meta device that a checkpoint may lack, as in torch; they become zero."""
        current = self._placement.current
        rows = (row for row in self._map.originals if row.kept and row.in_state_dict)
        absent = (row.key for row in rows if row.key not in self.given and row.key not in self.missing)
        return [key for key in absent if key in current and current[key].is_meta]

    def stored_for(self, values: Tensor) -> StoredTensor | None:
        """Return the stored tensor that a stand-in represents, or None for a tensor with values."""
        return self._files.get(id(values))

    def _with_file(self, problem: str) -> str:
        found = _AT_START.match(problem)
        if found is None or found[1] not in self._stored:
            return problem
        return f"{found[0]} in `{self._stored[found[1]].file}`{problem[found.end() :]}"

    def _custom(self) -> Iterator[str]:
        for name, module in self._placement.graph_module.named_modules():
            if has_custom_loading(module):
                yield (
                    f"module `{name}` ({type(module).__name__}) loads its part by its own code, or has tensors of "
                    "unusual kinds: read the checkpoint with safetensors, and call load_original_state_dict"
                )

    def _left_on_meta(self) -> Iterator[str]:
        for key, tensor in self._placement.current.items():
            if tensor.is_meta and key not in self._placement.loaded:
                owner, _, name = key.rpartition(".")
                yield (
                    f"`{key}` is not part of a checkpoint, since it is not saved with the model, and it is on the meta "
                    "device, where it holds nothing: give it its values first "
                    f"(graph_module.get_submodule({owner!r}).{name} = ...), or make the model with it elsewhere"
                )

    def _different_ties(self) -> Iterator[str]:
        """Compare tensors that are one in the model, and several in the checkpoint."""
        for group in self._map.ties:
            found = [self._stored[key] for key in group if key in self._stored]
            for other in found[1:]:
                first = found[0]
                if not _same(first.read(), other.read()):
                    yield (
                        f"`{first.key}` in `{first.file}` and `{other.key}` in `{other.file}` are one tensor in the "
                        "model, and differ here: leave out one of them"
                    )


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )
