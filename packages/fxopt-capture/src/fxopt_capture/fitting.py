"""Whether the tensors of a checkpoint fit a rewritten module, told from the headers of its files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from fxopt_core.checkpoint_checks import Checked, unreachable
from fxopt_core.errors import CheckpointError
from fxopt_core.key_map import KeyMap
from fxopt_core.self_loading import SelfLoading, loads_itself

from .dtype_kinds import kind_of
from .placement import Placement
from .safetensors_files import Reader, StoredTensor
from .stored_names import stored_names_of

_AT_START = re.compile(r"`([^`]+)`")


def fitted(
    placement: Placement,
    stored: Mapping[str, StoredTensor],
    reader: Reader,
    path: str | os.PathLike[str],
    *,
    strict: bool,
) -> Fitted:
    """Compare a checkpoint with what a module asks for.

    Raises:
        CheckpointError: It does not fit; all that is wrong is named at once.
    """
    found = Fitted(placement, stored, path)
    found.check(reader, strict=strict)
    return found


class Fitted:
    """The tensors of a checkpoint that go somewhere.

    Attributes:
        given: for each original key with values, a tensor on the meta device that stands for them.
        missing: the original keys without values.
        unexpected: the keys that are not of the original model.
    """

    def __init__(self, placement: Placement, stored: Mapping[str, StoredTensor], path: str | os.PathLike[str]) -> None:
        self._placement, self._stored, self._path = placement, stored, path
        names: KeyMap = placement.names
        stand_ins = {key: torch.empty(each.shape, dtype=each.dtype, device="meta") for key, each in stored.items()}
        self._checked = Checked(names, stand_ins, None)
        self.given = self._checked.given
        self.missing, self.unexpected = self._checked.missing, self._checked.unexpected
        self._files: dict[int, StoredTensor] = {}

    def check(self, reader: Reader, *, strict: bool) -> None:
        """Find all that is wrong by the headers; of tied tensors that are there several times, the values too."""
        checked, placement = self._checked, self._placement
        checked.check(SelfLoading(placement.graph_module))
        checked.problems[:] = [self._with_file(problem) for problem in checked.problems]
        checked.problems += self._unusual()
        for key, values in list(self.given.items()):
            stored = self._stored_under(key)
            self._files[id(values)] = stored
            checked.problems += _kind_problem(key, stored, placement)
        if not checked.problems:
            checked.problems += self._different_ties(reader)
        if strict:
            checked.problems += self._hollow()
        self._raise(strict)

    def _raise(self, strict: bool) -> None:
        error = self._checked.error(strict, self._placement.current)
        if error is not None:
            where = [f"`{key}` is in `{self._stored[key].file}`" for key in self.unexpected if key in self._stored]
            converted = sorted(set(stored_names_of(self._placement.graph_module).converted) & set(self.missing))
            if converted:
                where.append(
                    f"transformers computes `{converted[0]}` from other tensors when it loads this model, which is not "
                    "done here: load the original model by from_pretrained, and use load_original_state_dict"
                )
            places = "".join(f"\n  {text}" for text in where) if strict else ""
            raise CheckpointError(
                f"`{self._path}`: {error}{places}", missing_keys=self.missing, unexpected_keys=self.unexpected
            )

    def check_folds(self, problems: Iterable[str], done: set[str], strict: bool) -> None:
        """Raise where folds that were computed on trial would not be finite, or some could not be.

        Args:
            problems: what was found on trial.
            done: the labels of the tensors that could be computed.
            strict: whether all have to be.
        """
        self._checked.problems += problems
        if strict and not self._checked.problems:
            self._checked.problems += unreachable(self._placement.names, done)
        self._raise(strict)

    def stand_in(self, key: str) -> Tensor | None:
        """Return what stands for the values of an original tensor; None where there are none."""
        group = self._placement.names.aliases.get(key, (key,))
        return next((self.given[name] for name in group if name in self.given), None)

    def counters(self) -> list[str]:
        """Return the counters on the meta device that a checkpoint may lack, as torch has it; they are zero then."""
        current = self._placement.current
        rows = (row for row in self._placement.names.originals if row.kept and row.in_state_dict)
        absent = (row.key for row in rows if row.key not in self.given and row.key not in self.missing)
        return [key for key in absent if key in current and current[key].is_meta]

    def stored_for(self, values: Tensor) -> StoredTensor | None:
        """Return the stored tensor that another one stands for, or None where that has values of its own."""
        return self._files.get(id(values))

    def _stored_under(self, key: str) -> StoredTensor:
        group = self._placement.names.aliases.get(key, (key,))
        return self._stored[key] if key in self._stored else next(self._stored[k] for k in group if k in self._stored)

    def _with_file(self, problem: str) -> str:
        found = _AT_START.match(problem)
        if found is None or found[1] not in self._stored:
            return problem
        return f"{found[0]} in `{self._stored[found[1]].file}`{problem[found.end() :]}"

    def _unusual(self) -> Iterator[str]:
        for name, module in self._placement.graph_module.named_modules():
            if loads_itself(module):
                yield (
                    f"module `{name}` ({type(module).__name__}) loads its part by its own code, or has tensors of "
                    "unusual kinds: read the checkpoint with safetensors, and call load_original_state_dict"
                )

    def _hollow(self) -> Iterator[str]:
        placement = self._placement
        for key, tensor in placement.current.items():
            if tensor.is_meta and key not in placement.loaded:
                owner, _, name = key.rpartition(".")
                yield (
                    f"`{key}` is no part of a checkpoint, since it is not saved with the model, and it is on the meta "
                    "device, where it holds nothing: give it its values first "
                    f"(graph_module.get_submodule({owner!r}).{name} = ...), or make the model with it elsewhere"
                )

    def _different_ties(self, reader: Reader) -> Iterator[str]:
        """Compare tensors that are one in the model, and several in the checkpoint."""
        for group in self._placement.names.ties:
            found = [self._stored[key] for key in group if key in self._stored]
            for other in found[1:]:
                first = found[0]
                if not _same(first, other, reader):
                    yield (
                        f"`{first.key}` in `{first.file}` and `{other.key}` in `{other.file}` are one tensor in the "
                        "model, and differ here: leave out one of them"
                    )


def _same(one: StoredTensor, other: StoredTensor, reader: Reader) -> bool:
    if one.dtype != other.dtype:
        return False
    with Reader() as second_reader:  # each has one buffer
        pairs = zip(reader.chunks(one), second_reader.chunks(other), strict=True)
        return all(torch.equal(first, second) for first, second in pairs)


def _kind_problem(key: str, stored: StoredTensor, placement: Placement) -> Iterator[str]:
    expected = placement.names.by_key[key].dtype
    if expected is not None and kind_of(expected) != kind_of(stored.dtype):
        text = f"expected {kind_of(expected)} values, to be {expected}"
        yield f"`{stored.key}` in `{stored.file}` is {stored.dtype}, {text}"
