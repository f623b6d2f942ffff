"""`KeyMap`: which tensors of the original model became which of the rewritten one, and how. Data, without tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from fxopt_core.errors import FxoptError
from fxopt_core.ledger_rows import Neutral, Piece

KEY_MAP_VERSION = 1
Kind = Literal["parameter", "buffer", "extra-state"]


@dataclass(frozen=True)
class OriginalTensor:
    """An entry of the original model.

    Attributes:
        key: its full name.
        shape: its shape; None where the layer has no such tensor, or where it is no tensor.
        dtype: its dtype when a pass took it out, or now; None where it has no shape.
        kind: "parameter", "buffer", or "extra-state" for what a module saves besides tensors.
        persistent: whether it is in the ``state_dict``; buffers need not be.
        kept: whether the rewritten module has it still, under the same key.
        beside: for a tensor that was taken out and whose value nothing holds, a new tensor made in its place.
    """

    key: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None = None
    kind: Kind = "parameter"
    persistent: bool = True
    kept: bool = True
    beside: str | None = None

    @property
    def in_state_dict(self) -> bool:
        """Whether the original ``state_dict`` has it."""
        return self.persistent and (self.shape is not None or self.kind == "extra-state")


@dataclass(frozen=True)
class NewTensor:
    """A tensor that a pass made.

    Attributes:
        label: what the steps call it: its full name, with a number added where several tensors had that name.
        key: its full name in the module as it is now; None where a later pass took it out again.
        shape: its shape.
        dtype: its dtype when it was made.
    """

    label: str
    key: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Part:
    """The region of a new tensor that an earlier tensor fills; ``source`` is its key or label."""

    source: str
    piece: Piece


@dataclass(frozen=True)
class Assembly:
    """A new tensor put together from earlier ones.

    Attributes:
        target: the new tensor.
        parts: which earlier tensor fills which region of it.
        fills: the regions that no earlier tensor fills, and the constants that stand in there.
        pass_name: the pass that made it.
    """

    target: NewTensor
    parts: tuple[Part, ...]
    fills: tuple[Neutral, ...] = ()
    pass_name: str = ""


@dataclass(frozen=True)
class Derivation:
    """New tensors that a function computes from earlier ones; see `fxopt_core.Derived` for the fields.

    Attributes:
        function: ``"module:name"`` of the function.
        inputs: pairs of its tensor parameters and the keys or labels of earlier tensors; None for an absent one.
        settings: pairs of its other parameters and their values.
        outputs: the new tensors, in the order of its results; None for an absent one.
        restore: ``"module:name"`` of the function that goes back, or None.
        pass_name: the pass that made them.
    """

    function: str
    inputs: tuple[tuple[str, str | None], ...]
    settings: tuple[tuple[str, Any], ...]
    outputs: tuple[NewTensor | None, ...]
    restore: str | None = None
    pass_name: str = ""


Step = Assembly | Derivation


@dataclass(frozen=True)
class Destination:
    """Where an original tensor goes.

    Attributes:
        key: full name of the tensor that it is written into; where ``derived``, the label of an input of a function.
        pieces: the region, the outermost first; empty where it fills all of it.
        derived: whether a function computes the new tensors from it, so that it can not be written there directly.
    """

    key: str
    pieces: tuple[Piece, ...] = ()
    derived: bool = False

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of ``tensor`` that the original fills.

        >>> place = Destination("merged.weight", (Piece("merged.weight", ((0, 2, 3),)),))
        >>> place.take(torch.zeros(8, 4)).shape
        torch.Size([3, 4])
        """
        for piece in self.pieces:
            tensor = piece.take(tensor)
        return tensor


@dataclass(frozen=True)
class KeyMap:
    """Which tensors of the original model became which of the rewritten one, over all passes that are applied.

    It holds no tensors, and pickles. `fxopt_core.key_map` makes it.

    Attributes:
        originals: all entries of the original model in the order of its ``state_dict``; absent ones and buffers that
            are not in it stand at their places.
        steps: what makes the new tensors, in an order in which it can be done.
        ties: groups of original keys that are one tensor.
    """

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
        """For each key or label that a step reads, the steps that do."""
        found: dict[str, list[Step]] = {}
        for step in self.steps:
            for source in dict.fromkeys(sources_of(step)):
                found.setdefault(source, []).append(step)
        return {source: tuple(steps) for source, steps in found.items()}

    @property
    def new_tensors(self) -> tuple[NewTensor, ...]:
        """The tensors of the rewritten module that passes made."""
        return tuple(target for step in self.steps for target in targets_of(step) if target.key is not None)

    @cached_property
    def assemblies(self) -> dict[str, Assembly]:
        """The steps that put tensors together, by the label of what they make."""
        return {step.target.label: step for step in self.steps if isinstance(step, Assembly)}

    def source_of(self, key: str) -> str:
        """Return what the steps call an original tensor: of tied ones, the first key."""
        return self.aliases.get(key, (key,))[0]

    def destinations(self, key: str) -> tuple[Destination, ...]:
        """Return where an original tensor goes; nowhere where its value is dropped.

        A loader that reads a checkpoint tensor by tensor can write each one there right away, but for inputs of
        functions: these have to wait for each other.

        Raises:
            FxoptError: The original model has no such key.
        """
        if key not in self.by_key:
            raise FxoptError(f"the original model has no `{key}`; its keys are in KeyMap.original_keys")
        here = (Destination(key),) if self.by_key[key].kept else ()
        return (*here, *self._ends(self.source_of(key)))

    def _ends(self, source: str) -> Iterator[Destination]:
        """Yield where a tensor ends that steps read."""
        waiting: list[tuple[str, tuple[Piece, ...]]] = [(source, ())]
        while waiting:
            label, inside = waiting.pop()
            for step in self.consumers.get(label, ()):
                if isinstance(step, Derivation):
                    yield Destination(label, inside, derived=True)
                    continue
                for part in step.parts:
                    if part.source == label:
                        outer = (part.piece, *inside)
                        waiting.append((step.target.label, outer))
                        if step.target.key is not None:
                            yield Destination(step.target.key, outer)

    def to_json(self) -> str:
        """Write the map as JSON text; docs/checkpoints.md tells the format.

        Raises:
            FxoptError: A setting of a function has no form in JSON.

        >>> KeyMap(()).to_json()
        '{"fxopt_key_map": 1, "originals": [], "steps": [], "ties": []}'
        """
        from fxopt_core.key_map_codec import key_map_to_json  # it imports this module

        return key_map_to_json(self)

    @staticmethod
    def from_json(text: str) -> KeyMap:
        """Read what `to_json` has written.

        Raises:
            FxoptError: The text is no key map, or a newer version of fxopt wrote it.

        >>> KeyMap.from_json(KeyMap(()).to_json()) == KeyMap(())
        True
        """
        from fxopt_core.key_map_codec import key_map_from_json  # it imports this module

        return key_map_from_json(text)

    def vllm_packed_modules_mapping(self) -> dict[str, list[str]]:
        """Return vLLM's ``packed_modules_mapping``: each merged layer, and the layers whose rows it holds, in order."""
        from fxopt_core.checkpoint_formats import packed_modules_mapping

        return packed_modules_mapping(self)

    def vllm_orig_to_new_stacked(self) -> dict[str, tuple[str, int]]:
        """Return vLLM's ``orig_to_new_stacked``: each original parameter, the merged one, and its place in that.

        Raises:
            FxoptError: Some original tensor went elsewhere than into rows of a merged one, which vLLM cannot express.
        """
        from fxopt_core.checkpoint_formats import orig_to_new_stacked

        return orig_to_new_stacked(self)

    def weight_converters(self) -> list[Any]:
        """Return ``WeightConverter`` objects of transformers, one for each group of tensors that belong together.

        Raises:
            FxoptError: transformers is not installed, or a name has characters that its patterns cannot express.
        """
        from fxopt_core.checkpoint_formats import weight_converters

        return weight_converters(self)

    def __str__(self) -> str:
        """Return a table: each original tensor that a pass took out, and what became of it."""
        others = sum(row.in_state_dict and row.kept for row in self.originals)
        moved = [row for row in self.originals if row.shape is not None and not row.kept]
        lines = [("original", "shape", "now")] + [(row.key, str(row.shape), self._fate(row)) for row in moved]
        for step in self.assemblies.values():
            for fill in step.fills:
                lines.append((f"({fill.value:g} stands in)", "", self._place(step.target, fill.piece)))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines] if moved else []
        return "\n".join([*text, f"{others} {'other ' if moved else ''}keys are what they were"])

    def _place(self, target: NewTensor, piece: Piece) -> str:
        """Return where a region of a new tensor is now."""
        ends = [Destination(target.key)] if target.key is not None else list(self._ends(target.label))
        return "; ".join(end.key + "".join(map(region_text, (*end.pieces, piece))) for end in ends)

    def _fate(self, row: OriginalTensor) -> str:
        texts = []
        for place in self.destinations(row.key):
            if not place.derived:
                texts.append(place.key + "".join(map(region_text, place.pieces)))
                continue
            functions = [step for step in self.consumers[place.key] if isinstance(step, Derivation)]
            names = [output.key or output.label for step in functions for output in step.outputs if output]
            texts.append(f"{', '.join(names)} by {functions[0].function.rpartition(':')[2]}")
        return "; ".join(texts) or "not kept"


def sources_of(step: Step) -> list[str]:
    """Return the keys and labels that a step reads."""
    if isinstance(step, Assembly):
        return [part.source for part in step.parts]
    return [source for _, source in step.inputs if source is not None]


def targets_of(step: Step) -> list[NewTensor]:
    """Return the new tensors that a step makes."""
    return [step.target] if isinstance(step, Assembly) else [output for output in step.outputs if output is not None]


def region_text(piece: Piece) -> str:
    """Return a region as it is written in Python.

    >>> region_text(Piece("a", ((0, 4, 2),))), region_text(Piece("a", ((1, 4, 1),), squeeze=1))
    ('[4:6]', '[:, 4]')
    """
    counts = Counter(dim for dim, _, _ in piece.slices)
    if any(count > 1 for count in counts.values()) or any(dim < 0 for dim in counts):
        return f"{list(piece.slices)}"
    inside = {dim: f"{start}:{start + length}" for dim, start, length in piece.slices}
    inside |= {dim: str(start) for dim, start, length in piece.slices if dim == piece.squeeze}
    text = ", ".join(inside.get(dim, ":") for dim in range(max(inside, default=-1) + 1))
    return (f"[{text}]" if text else "") + (".T" if piece.transposed else "")
