"""Data on which tensors of the original model became which of the rewritten one, and how."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from fxopt_core.errors import FxoptError
from fxopt_rewrite import (
    Neutral,
    Piece,
)

Kind = Literal["parameter", "buffer", "extra-state"]


@dataclass(frozen=True)
class OriginalTensor:
    """An entry of the original model.

    Attributes:
        key: its full name.
        shape: its shape; None if the layer has no such tensor, or if it is not a tensor.
        dtype: its dtype when a pass removed it, or now; None if it has no shape.
        kind: "parameter", "buffer", or "extra-state" for anything else that a module saves.
        persistent: whether it is in the ``state_dict``; buffers need not be.
        kept: whether the rewritten module still has it, under the same key.
    """

    key: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None = None
    kind: Kind = "parameter"
    persistent: bool = True
    kept: bool = True

    @property
    def in_state_dict(self) -> bool:
        """Whether the original ``state_dict`` has it."""
        return self.persistent and (self.shape is not None or self.kind == "extra-state")


@dataclass(frozen=True)
class NewTensor:
    """A tensor that a pass made."""

    label: str  # its name in the steps: its full name, with a number added if several tensors had this name
    key: str | None  # its full name in the present module; None if a later pass removed it again
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None  # when it was made

    @property
    def name(self) -> str:
        """Its name for messages."""
        return self.key or self.label


@dataclass(frozen=True)
class Part:
    """The region of a new tensor that an earlier tensor fills; ``source`` is its key or label."""

    source: str
    piece: Piece


@dataclass(frozen=True)
class Assembly:
    """A new tensor put together from earlier ones."""

    target: NewTensor
    parts: tuple[Part, ...]
    fills: tuple[Neutral, ...] = ()  # regions that no earlier tensor fills, and the constants that stand in there
    pass_name: str = ""

    @property
    def sources(self) -> list[str]:
        """The keys and labels of the tensors that it reads."""
        return [part.source for part in self.parts]

    @property
    def targets(self) -> list[NewTensor]:
        """The new tensors that it makes."""
        return [self.target]


@dataclass(frozen=True)
class Derivation:
    """New tensors that a function computes from earlier ones: a `fxopt_core.Derived` with keys and labels as names."""

    function: str
    inputs: tuple[tuple[str, str | None], ...]
    settings: tuple[tuple[str, Any], ...]
    outputs: tuple[NewTensor | None, ...]
    restore: str | None = None
    pass_name: str = ""

    @property
    def sources(self) -> list[str]:
        """The keys and labels of the tensors that it reads."""
        return [source for _, source in self.inputs if source is not None]

    @property
    def targets(self) -> list[NewTensor]:
        """The new tensors that it makes."""
        return [output for output in self.outputs if output is not None]


Step = Assembly | Derivation
Pieces = tuple[Piece, ...]


def region(tensor: Tensor, pieces: Pieces) -> Tensor:
    """Return the view of a tensor that nested pieces take, the outermost first."""
    for piece in pieces:
        tensor = piece.take(tensor)
    return tensor


@dataclass(frozen=True)
class Destination:
    """Where an original tensor goes.

    Attributes:
        key: full name of the tensor that it is written into; if ``derived``, the label of an input of a function.
        pieces: the region, the outermost first; empty if it fills all of the tensor.
        derived: whether a function computes the new tensors from it, so that it cannot be written there directly.
    """

    key: str
    pieces: Pieces = ()
    derived: bool = False

    def take(self, tensor: Tensor) -> Tensor:
        """Return the view of ``tensor`` that the original fills.

        >>> import torch
        >>> place = Destination("merged.weight", (Piece("merged.weight", ((0, 2, 3),)),))
        >>> place.take(torch.zeros(8, 4)).shape
        torch.Size([3, 4])
        """
        return region(tensor, self.pieces)


@dataclass(frozen=True)
class TensorMap:
    """The data of a `KeyMap`, which documents the fields, with the queries of loading, saving and exporting."""

    originals: tuple[OriginalTensor, ...]
    steps: tuple[Step, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()

    @property
    def original_keys(self) -> tuple[str, ...]:
        """The keys of the original ``state_dict``, in order."""
        return tuple(row.key for row in self.originals if row.in_state_dict)

    @cached_property
    def by_key(self) -> dict[str, OriginalTensor]:
        """The entries of the original model by key."""
        return {row.key: row for row in self.originals}

    @cached_property
    def aliases(self) -> dict[str, tuple[str, ...]]:
        """For each original key that is tied, its group."""
        return {key: group for group in self.ties for key in group}

    @cached_property
    def consumers(self) -> dict[str, tuple[Step, ...]]:
        """The steps that read a key or label, for each that is read."""
        found: dict[str, list[Step]] = {}
        for step in self.steps:
            for source in dict.fromkeys(step.sources):
                found.setdefault(source, []).append(step)
        return {source: tuple(steps) for source, steps in found.items()}

    @cached_property
    def made(self) -> dict[str, NewTensor]:
        """All tensors that passes made, by label, including those that later passes removed."""
        return {target.label: target for step in self.steps for target in step.targets}

    @property
    def new_tensors(self) -> tuple[NewTensor, ...]:
        """The tensors of the rewritten module that passes made."""
        return tuple(target for target in self.made.values() if target.key is not None)

    @cached_property
    def assemblies(self) -> dict[str, Assembly]:
        """The assemblies, by the label of the tensor that they make."""
        return {step.target.label: step for step in self.steps if isinstance(step, Assembly)}

    def source_of(self, key: str) -> str:
        """Return the name of an original tensor in the steps: the first of tied keys."""
        return self.aliases.get(key, (key,))[0]

    def destinations(self, key: str) -> tuple[Destination, ...]:
        """Return where an original tensor goes; empty if its values are dropped.

        A loader that reads a checkpoint tensor by tensor can write each one there right away, except inputs of
        functions, which have to wait for each other.

        Raises:
            FxoptError: The original model has no such key.
        """
        if key not in self.by_key:
            raise FxoptError(f"the original model has no `{key}`; its keys are in KeyMap.original_keys")
        here = (Destination(key),) if self.by_key[key].kept else ()
        return (*here, *self._reached(self.source_of(key)))

    def places_of(self, target: NewTensor) -> tuple[Destination, ...]:
        """Return where the values of a new tensor are now: in itself, or in later ones."""
        return tuple(self._reached(target.label)) if target.key is None else (Destination(target.key),)

    def _reached(self, source: str) -> Iterator[Destination]:
        """Yield the places where a tensor that steps read ends up."""
        waiting: list[tuple[str, Pieces]] = [(source, ())]
        while waiting:
            label, inside = waiting.pop()
            for step in self.consumers.get(label, ()):
                if isinstance(step, Derivation):
                    yield Destination(label, inside, derived=True)
                    continue
                for part in step.parts:
                    if part.source == label:
                        # Each step puts the region so far into a larger tensor, so its piece is the outermost.
                        outer = (part.piece, *inside)
                        waiting.append((step.target.label, outer))
                        if step.target.key is not None:
                            yield Destination(step.target.key, outer)


def listed(keys: Iterable[str]) -> str:
    """Return names for a message."""
    return ", ".join(f"`{key}`" for key in keys)
