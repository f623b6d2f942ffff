"""`KeyMap`: which original tensors became which of the rewritten model; as JSON, as a table, for vLLM."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

from fxopt_checkpoints.formats import orig_to_new_stacked, packed_modules_mapping
from fxopt_checkpoints.tensor_map import Assembly, Derivation, Destination, NewTensor, OriginalTensor, Part, TensorMap
from fxopt_core import text_table
from fxopt_rewrite import Fields, Neutral, Piece, ValueWriter

KEY_MAP_VERSION = 2


@dataclass(frozen=True)
class KeyMap(TensorMap):
    """Which original tensors became which of the rewritten model, over all passes that are applied.

    It holds no tensors, and can be pickled. `fxopt_checkpoints.key_map` makes it.

    Attributes:
        originals: all entries of the original model in the order of its ``state_dict``, including absent tensors and
            buffers that are not in it.
        steps: the steps that make the new tensors, each after those that it reads from.
        ties: groups of original keys that are one tensor.
    """

    def to_json(self) -> str:
        """Write the map as JSON text for scripts; docs/checkpoints.md describes the format.

        Raises:
            FxoptError: JSON cannot express a setting of a function.

        >>> KeyMap(()).to_json()
        '{"fxopt_key_map": 2, "originals": []}'
        """
        return json.dumps({"fxopt_key_map": KEY_MAP_VERSION, **ValueWriter(_FIELDS.writers).write(self)["KeyMap"]})

    def vllm_packed_modules_mapping(self) -> dict[str, list[str]]:
        """Return vLLM's ``packed_modules_mapping``: each merged layer, and the layers whose rows it holds, in order."""
        return packed_modules_mapping(self)

    def vllm_orig_to_new_stacked(self) -> dict[str, tuple[str, int]]:
        """Return vLLM's ``orig_to_new_stacked``: each original parameter, the merged one, and its position there.

        Raises:
            FxoptError: An original tensor did not become rows of a merged one, which vLLM cannot express.
        """
        return orig_to_new_stacked(self)

    def __str__(self) -> str:
        """Return a table of the original tensors that passes removed, and what became of them."""
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


_FIELDS = Fields((KeyMap, OriginalTensor, NewTensor, Part, Assembly, Derivation, Neutral, Piece))


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
