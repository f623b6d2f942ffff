"""`KeyMap`: which tensors of the original model became which of the rewritten one; as JSON, as a table, for vLLM."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fxopt_checkpoints.formats import orig_to_new_stacked, packed_modules_mapping
from fxopt_checkpoints.tensor_map import Assembly, Derivation, Destination, NewTensor, OriginalTensor, Part, TensorMap
from fxopt_core import is_plain_data, text_table
from fxopt_core.errors import FxoptError
from fxopt_rewrite import (
    Fields,
    Neutral,
    Piece,
    ValueReader,
    ValueWriter,
)

KEY_MAP_VERSION = 2


@dataclass(frozen=True)
class KeyMap(TensorMap):
    """Which tensors of the original model became which of the rewritten one, over all passes that are applied.

    It holds no tensors, and pickles. `fxopt_checkpoints.key_map` makes it.

    Attributes:
        originals: all entries of the original model in the order of its ``state_dict``, among them absent tensors and
            buffers that are not in it.
        steps: what makes the new tensors, each after those that it reads from.
        ties: groups of original keys that are one tensor.
    """

    def to_json(self) -> str:
        """Write the map as JSON text; docs/checkpoints.md describes the format.

        Raises:
            FxoptError: A setting of a function has no form in JSON.

        >>> KeyMap(()).to_json()
        '{"fxopt_key_map": 2, "originals": []}'
        """
        return json.dumps({_KEY: KEY_MAP_VERSION, **ValueWriter(_FIELDS.writers).write(self)["KeyMap"]})

    @staticmethod
    def from_json(text: str) -> KeyMap:
        """Read what `to_json` has written.

        Raises:
            FxoptError: The text is no key map, or a newer version of fxopt wrote it.

        >>> KeyMap.from_json(KeyMap(()).to_json()) == KeyMap(())
        True
        """
        try:
            data = json.loads(text)
            version = data.pop(_KEY) if isinstance(data, dict) and _KEY in data else None
            if type(version) is not int or version < 1:
                raise ValueError(f"found no version under {_KEY!r}")
            if version <= KEY_MAP_VERSION:
                found: KeyMap = ValueReader(_FIELDS.readers).read({"KeyMap": data})
                _check(found)
                return found
        except (ValueError, TypeError, RuntimeError, OverflowError, FxoptError) as error:
            raise FxoptError(
                f"this key map cannot be read: {error}; expected what KeyMap.to_json wrote: it was cut off or changed"
            ) from error
        raise FxoptError(
            f"this key map was written by version {version} of its format, and this fxopt reads versions up to "
            f"{KEY_MAP_VERSION}: install a newer fxopt-checkpoints"
        )

    def vllm_packed_modules_mapping(self) -> dict[str, list[str]]:
        """Return vLLM's ``packed_modules_mapping``: each merged layer, and the layers whose rows it holds, in order."""
        return packed_modules_mapping(self)

    def vllm_orig_to_new_stacked(self) -> dict[str, tuple[str, int]]:
        """Return vLLM's ``orig_to_new_stacked``: each original parameter, the merged one, and its place in that.

        Raises:
            FxoptError: Some original tensor went elsewhere than into rows of a merged one, which vLLM cannot express.
        """
        return orig_to_new_stacked(self)

    def __str__(self) -> str:
        """Return a table: each original tensor that a pass took out, and what became of it."""
        others = sum(row.in_state_dict and row.kept for row in self.originals)
        moved = [row for row in self.originals if row.shape is not None and not row.kept]
        lines = [("original", "shape", "now")] + [(row.key, str(row.shape), self._fate(row)) for row in moved]
        for step in self.assemblies.values():
            for fill in step.fills:
                places = "; ".join(_place_text(place, fill.piece) for place in self.places_of(step.target))
                lines.append((f"({fill.value:g} stands in)", "", places))
        text = text_table(lines) if moved else []
        return "\n".join([*text, f"{others} {'other ' if moved else ''}keys are what they were"])

    def _fate(self, row: OriginalTensor) -> str:
        texts = []
        for place in self.destinations(row.key):
            if not place.derived:
                texts.append(_place_text(place))
                continue
            functions = [step for step in self.consumers[place.key] if isinstance(step, Derivation)]
            names = ", ".join(target.name for step in functions for target in step.targets)
            texts.append(f"{names} by {functions[0].function.rpartition(':')[2]}")
        return "; ".join(texts) or "not kept"


_KEY = "fxopt_key_map"
_FIELDS = Fields((KeyMap, OriginalTensor, NewTensor, Part, Assembly, Derivation, Neutral, Piece))


def _check(key_map: KeyMap) -> None:
    """Check that steps read what is there, and fill regions that are there."""
    shapes = {row.key: row.shape for row in key_map.originals}
    known = {*shapes, *key_map.made}
    unknown = [key for group in key_map.ties for key in group if key not in shapes]
    unknown += [row.beside for row in key_map.originals if row.beside is not None and row.beside not in known]
    for step in key_map.steps:
        unknown += [source for source in step.sources if source not in shapes]
        shapes |= {target.label: target.shape for target in step.targets}
        if isinstance(step, Assembly):
            _check_regions(step, shapes)
        elif not all(is_plain_data(value) for _, value in step.settings):
            raise ValueError(f"found settings of `{step.function}` that are not numbers, texts or tuples of these")
    if unknown:
        raise ValueError(f"found `{unknown[0]}`, which is neither an original key nor made by a step before")


def _check_regions(step: Assembly, shapes: Mapping[str, tuple[int, ...] | None]) -> None:
    """Check that regions lie inside of the tensor, and are as large as what fills them."""
    label, whole = step.target.label, torch.empty(step.target.shape, device="meta")
    for piece, source in (*((p.piece, p.source) for p in step.parts), *((f.piece, None) for f in step.fills)):
        try:
            found = tuple(piece.take(whole).shape)
        except (RuntimeError, IndexError) as error:
            raise ValueError(f"found a region that `{label}` does not have ({error})") from error
        expected = found if source is None else shapes.get(source, found)
        if found != expected or piece.key != label:
            raise ValueError(f"found `{source}` of shape {expected} in a region of `{piece.key}` of shape {found}")


def _place_text(place: Destination, *inside: Piece) -> str:
    return place.key + "".join(map(region_text, (*place.pieces, *inside)))


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
