"""`KeyMap`: which original tensors became which of the rewritten model; as a table, for vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from fxopt_checkpoints.tensor_map import Derivation, Destination, OriginalTensor, TensorMap
from fxopt_core import FxoptError, text_table
from fxopt_rewrite import Piece


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

    def vllm_packed_modules_mapping(self) -> dict[str, list[str]]:
        """Return vLLM's ``packed_modules_mapping``: each merged layer, and the layers whose rows it holds, in order.

        It tells vLLM which layers share a quantized weight or an adapter. Layers made in other ways, such as folded
        ones, are left out.
        """
        found = {}
        for target, rows in _stacked(self).items():
            merged, _, name = target.rpartition(".")
            if name == "weight":
                found[merged] = [key.rpartition(".")[0] for key in rows]
        return found

    def vllm_orig_to_new_stacked(self) -> dict[str, tuple[str, int]]:
        """Return vLLM's ``orig_to_new_stacked``: each original parameter, the merged one, and its position there.

        vLLM's ``WeightsMapper`` replaces the first text in a key by the second, for every entry in turn, and passes the
        number to the ``weight_loader`` of the merged parameter.

        Raises:
            FxoptError: An original tensor did not become rows of a merged one, a merged one has rows that no checkpoint
                fills, or an entry would change other keys, since vLLM looks for it anywhere in them.
        """
        stacked = _stacked(self)
        places = {key: (target, number) for target, rows in stacked.items() for number, key in enumerate(rows)}
        problems = [*_inexpressible(self, set(stacked), places), *_mistaken(self, places)]
        if problems:
            raise FxoptError("vLLM's orig_to_new_stacked cannot express this key map:\n  " + "\n  ".join(problems))
        return places

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
        return "\n".join([*text, f"{others} {'other ' if moved else ''}keys are unchanged"])

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


def _moved(names: TensorMap) -> list[OriginalTensor]:
    """Return the entries of the original ``state_dict`` that the rewritten module does not have any more."""
    return [row for row in names.originals if row.in_state_dict and not row.kept]


def _stacked(names: TensorMap) -> dict[str, list[str]]:
    """Return the original keys, in order, for each new tensor that stacks rows of original ones."""
    rows: dict[str, list[tuple[int, int, str]]] = {}
    other: set[str] = set()
    for row in _moved(names):
        for place in names.destinations(row.key):
            start = _first_row(place)
            if start is None:
                other.add(place.key)
            else:
                rows.setdefault(place.key, []).append((start, row.shape[0] if row.shape else 1, row.key))
    made = {target.key for target in names.new_tensors}
    return {
        target: [key for *_, key in sorted(found, key=lambda each: each[:2])]
        for target, found in rows.items()
        if target in made and target not in other
    }


def _first_row(place: Destination) -> int | None:
    """Return the row at which an original tensor begins; None if it does not consist of rows."""
    start = 0
    for piece in place.pieces:
        if piece.squeeze is not None or piece.transposed or [dim for dim, _, _ in piece.slices] != [0]:
            return None
        start += piece.slices[0][1]
    return start


def _inexpressible(names: TensorMap, stacked: set[str], places: dict[str, tuple[str, int]]) -> Iterator[str]:
    """Describe original tensors that do not become rows of merged ones, and rows that they do not fill."""
    for row in _moved(names):
        if row.key not in places:
            ends = names.destinations(row.key)
            is_derived = any(end.derived for end in ends)
            how = "is computed together with others" if is_derived else "is not a range of rows of a merged tensor"
            yield f"`{row.key}` {how if ends else 'is dropped'}"
    for step in names.assemblies.values():
        for end in names.places_of(step.target) if step.fills else ():
            if end.key in stacked and not end.derived:
                yield (
                    f"`{end.key}` has rows where {step.fills[0].value:g} stands in for parameters that the original "
                    "does not have; vLLM would leave them unfilled"
                )


def _mistaken(names: TensorMap, places: dict[str, tuple[str, int]]) -> Iterator[str]:
    """Describe keys that vLLM would map wrongly, since it looks for entries anywhere in a key, one after the other."""
    for key in names.original_keys:
        found = key
        for text, (target, _) in places.items():
            found = found.replace(text, target, 1)
        if found != (places[key][0] if key in places else key):
            yield f"`{key}` contains the text of another entry, and would become `{found}`"
