"""Key maps as vLLM's tables."""

from __future__ import annotations

from fxopt_checkpoints.tensor_map import Destination, OriginalTensor, TensorMap
from fxopt_core.errors import FxoptError


def packed_modules_mapping(tensor_map: TensorMap) -> dict[str, list[str]]:
    """Return for each merged layer the layers whose rows it holds, in order, all by full name.

    It tells vLLM which layers share a quantized weight or an adapter. Layers made in other ways, such as folded ones,
    are left out.
    """
    found = {}
    for target, rows in _stacked(tensor_map).items():
        merged, _, name = target.rpartition(".")
        if name == "weight":
            found[merged] = [key.rpartition(".")[0] for key in rows]
    return found


def orig_to_new_stacked(tensor_map: TensorMap) -> dict[str, tuple[str, int]]:
    """Return for each original parameter, by full name, the merged one and the original's position in it.

    vLLM's ``WeightsMapper`` replaces the first text in a key by the second, for every entry in turn, and passes the
    number to the ``weight_loader`` of the merged parameter.

    Raises:
        FxoptError: An original tensor did not become rows of a merged one, a merged one has rows that no checkpoint
            fills, or an entry would change other keys, since vLLM looks for it anywhere in them.
    """
    stacked = _stacked(tensor_map)
    places = {key: (target, number) for target, rows in stacked.items() for number, key in enumerate(rows)}
    problems = _inexpressible(tensor_map, set(stacked), places) + _mistaken(tensor_map, places)
    if problems:
        raise FxoptError("vLLM's orig_to_new_stacked cannot express this key map:\n  " + "\n  ".join(problems))
    return places


def _moved(tensor_map: TensorMap) -> list[OriginalTensor]:
    """Return the entries of the original ``state_dict`` that the rewritten module does not have any more."""
    return [row for row in tensor_map.originals if row.in_state_dict and not row.kept]


def _stacked(tensor_map: TensorMap) -> dict[str, list[str]]:
    """Return the original keys, in order, for each new tensor that stacks rows of original ones."""
    rows: dict[str, list[tuple[int, int, str]]] = {}
    other: set[str] = set()
    for row in _moved(tensor_map):
        for place in tensor_map.destinations(row.key):
            start = _first_row(place)
            if start is None:
                other.add(place.key)
            else:
                rows.setdefault(place.key, []).append((start, row.shape[0] if row.shape else 1, row.key))
    made = {target.key for target in tensor_map.new_tensors}
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


def _inexpressible(tensor_map: TensorMap, stacked: set[str], places: dict[str, tuple[str, int]]) -> list[str]:
    """Describe original tensors that do not become rows of merged ones, and rows that they do not fill."""
    problems = []
    for row in _moved(tensor_map):
        if row.key not in places:
            ends = tensor_map.destinations(row.key)
            how = "is computed with others" if any(end.derived for end in ends) else "is no rows of a merged tensor"
            problems.append(f"`{row.key}` {how if ends else 'is dropped'}")
    for step in tensor_map.assemblies.values():
        if step.fills:
            problems += [
                f"`{end.key}` has rows where {step.fills[0].value:g} stands in for parameters that the original does "
                "not have; vLLM would leave them unfilled"
                for end in tensor_map.places_of(step.target)
                if end.key in stacked and not end.derived
            ]
    return problems


def _mistaken(tensor_map: TensorMap, places: dict[str, tuple[str, int]]) -> list[str]:
    """Describe keys that vLLM would map wrongly, since it looks for entries anywhere in a key, one after the other."""
    lengths = sorted({len(key) for key in places})
    order = {key: number for number, key in enumerate(places)}
    problems = []
    for row in tensor_map.originals:
        if not row.in_state_dict:
            continue
        expected = places[row.key][0] if row.key in places else row.key
        found, last = row.key, -1
        while True:
            inside = {found[i : i + n] for n in lengths for i in range(len(found) - n + 1)} & places.keys()
            later = [key for key in inside if order[key] > last]
            if not later:
                break
            key = min(later, key=order.__getitem__)
            found, last = found.replace(key, places[key][0], 1), order[key]
        if found != expected:
            problems.append(f"`{row.key}` contains the text of another entry, and would become `{found}`")
    return problems
