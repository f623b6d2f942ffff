"""Key maps in the formats of others: vLLM's tables, and transformers' weight converters."""

from __future__ import annotations

import re
from typing import Any

from fxopt_core.checkpoint_transformers import converters
from fxopt_core.errors import FxoptError
from fxopt_core.key_map import Derivation, KeyMap, NewTensor, OriginalTensor, Step, sources_of, targets_of


def packed_modules_mapping(key_map: KeyMap) -> dict[str, list[str]]:
    """Return for each merged layer the layers whose rows it holds, in order, all by full name.

    This is what vLLM calls ``packed_modules_mapping``; it reads it to tell which layers share a quantized weight or an
    adapter. Layers that came about in other ways, such as folded ones, are no packed modules and are left out.
    """
    found: dict[str, list[str]] = {}
    for target, rows in _stacked(key_map).items():
        merged, _, name = target.rpartition(".")
        if name == "weight":
            found[merged] = [key.rpartition(".")[0] for key in rows]
    return found


def orig_to_new_stacked(key_map: KeyMap) -> dict[str, tuple[str, int]]:
    """Return for each original parameter the merged one, and its place there, both by full name.

    This is the form of ``WeightsMapper(orig_to_new_stacked=...)`` of vLLM. It replaces the first text in a key by the
    second, for every entry in turn, and hands the number to the ``weight_loader`` of the merged parameter.

    Raises:
        FxoptError: An original tensor went elsewhere than into rows of a merged one, a merged one has rows that no
            checkpoint fills, or an entry would change other keys, since vLLM looks for it anywhere in them.
    """
    stacked = _stacked(key_map)
    places = {
        row.key: place
        for target, rows in stacked.items()
        for number, key in enumerate(rows)
        for place in [(target, number)]
        for row in [key_map.by_key[key]]
    }
    problems = _inexpressible(key_map, set(stacked), places)
    problems += _mistaken(key_map, places)
    if problems:
        raise FxoptError("vLLM's orig_to_new_stacked cannot express this key map:\n  " + "\n  ".join(problems))
    return places


def _stacked(key_map: KeyMap) -> dict[str, list[str]]:
    """Return for each new tensor that is rows of original ones, one below the other, the original keys in order."""
    rows: dict[str, list[tuple[int, int, str]]] = {}
    other: set[str] = set()
    for row in key_map.originals:
        if not row.in_state_dict or row.kept:
            continue
        for place in key_map.destinations(row.key):
            start = 0
            for piece in place.pieces:
                plain = piece.squeeze is None and not piece.transposed and len(piece.slices) == 1
                if not plain or piece.slices[0][0] != 0:
                    other.add(place.key)
                    break
                start += piece.slices[0][1]
            length = row.shape[0] if row.shape else 1
            rows.setdefault(place.key, []).append((start, length, row.key))
    made = {target.key for target in key_map.new_tensors}
    return {
        target: [key for *_, key in sorted(found, key=lambda each: each[:2])]
        for target, found in rows.items()
        if target in made and target not in other
    }


def _inexpressible(key_map: KeyMap, stacked: set[str], places: dict[str, tuple[str, int]]) -> list[str]:
    """Say what does not go into rows of merged tensors, or does not fill them."""
    problems = []
    for row in key_map.originals:
        if row.in_state_dict and not row.kept and row.key not in places:
            ends = key_map.destinations(row.key)
            how = "is computed with others" if any(end.derived for end in ends) else "is no rows of a merged tensor"
            problems.append(f"`{row.key}` {how if ends else 'is dropped'}")
    for step in key_map.assemblies.values():
        if step.fills:
            problems += [
                f"`{end}` has rows where {step.fills[0].value:g} stands in for parameters that the original does not "
                "have; vLLM would leave them unfilled"
                for end in _ends(key_map, step.target)
                if end in stacked
            ]
    return problems


def _ends(key_map: KeyMap, target: NewTensor) -> list[str]:
    """Return the tensors of the rewritten module that hold a new tensor."""
    if target.key is not None:
        return [target.key]
    ends = []
    for step in key_map.consumers.get(target.label, ()):
        if not isinstance(step, Derivation):
            ends += _ends(key_map, step.target)
    return ends


def _mistaken(key_map: KeyMap, places: dict[str, tuple[str, int]]) -> list[str]:
    """Say which keys vLLM would map wrongly, since it looks for entries anywhere in a key, one after the other."""
    lengths = sorted({len(key) for key in places})
    order = {key: number for number, key in enumerate(places)}
    problems = []
    for row in key_map.originals:
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


_PLAIN_NAME = re.compile(r"[A-Za-z0-9_\-.]+")


def weight_converters(key_map: KeyMap) -> list[Any]:
    """Return converters of transformers; see `KeyMap.weight_converters`."""
    for row in key_map.originals:
        if not row.kept and not _PLAIN_NAME.fullmatch(row.key):
            raise FxoptError(f"`{row.key}` has characters that mean something else in the patterns of transformers")
    try:
        return converters(independent_parts(key_map))
    except ImportError as error:
        raise FxoptError(
            f"KeyMap.weight_converters needs transformers 5, which cannot be imported here ({error}): pip install "
            "'transformers>=5'"
        ) from error


def independent_parts(key_map: KeyMap) -> list[KeyMap]:
    """Return key maps for the groups of tensors that have nothing to do with each other; what is kept is in none."""
    root: dict[str, str] = {}

    def find(label: str) -> str:
        root.setdefault(label, label)
        while root[label] != label:
            root[label] = label = root[root[label]]
        return label

    for step in key_map.steps:
        first, *others = [*(target.label for target in targets_of(step)), *sources_of(step)]
        for label in others:
            root[find(label)] = find(first)
    originals: dict[str, list[OriginalTensor]] = {}
    for row in key_map.originals:
        if row.in_state_dict and not row.kept:
            label = key_map.source_of(row.key) if row.beside is None else row.beside
            originals.setdefault(find(label), []).append(row)
    steps: dict[str, list[Step]] = {}
    for step in key_map.steps:
        steps.setdefault(find(targets_of(step)[0].label), []).append(step)
    ties: dict[str, list[tuple[str, ...]]] = {}
    for tie in key_map.ties:
        ties.setdefault(find(tie[0]), []).append(tie)
    return [
        KeyMap(tuple(rows), tuple(steps.get(group, ())), tuple(ties.get(group, ())))
        for group, rows in originals.items()
    ]
