"""Key maps in the formats of others: vLLM's tables, and transformers' weight converters."""

from __future__ import annotations

import importlib
import re
from typing import Any

from torch import Tensor

from fxopt_checkpoints.arithmetic import NewTensors, OriginalTensors
from fxopt_checkpoints.tensor_map import Destination, OriginalTensor, Step, TensorMap, listed
from fxopt_core.errors import CheckpointError, FxoptError


def packed_modules_mapping(tensor_map: TensorMap) -> dict[str, list[str]]:
    """Return for each merged layer the layers whose rows it holds, in order, all by full name.

    From it vLLM knows which layers share a quantized weight or an adapter. Layers that came about in other ways, such
    as folded ones, are left out.
    """
    found = {}
    for target, rows in _stacked(tensor_map).items():
        merged, _, name = target.rpartition(".")
        if name == "weight":
            found[merged] = [key.rpartition(".")[0] for key in rows]
    return found


def orig_to_new_stacked(tensor_map: TensorMap) -> dict[str, tuple[str, int]]:
    """Return for each original parameter the merged one, and its place there, both by full name.

    vLLM's ``WeightsMapper`` replaces the first text in a key by the second, for every entry in turn, and hands the
    number to the ``weight_loader`` of the merged parameter.

    Raises:
        FxoptError: An original tensor went elsewhere than into rows of a merged one, a merged one has rows that no
            checkpoint fills, or an entry would change other keys, since vLLM looks for it anywhere in them.
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
    """Return for each new tensor that is rows of original ones, one below the other, the original keys in order."""
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
    """Return the row at which an original tensor begins; None where it is no rows."""
    start = 0
    for piece in place.pieces:
        if piece.squeeze is not None or piece.transposed or [dim for dim, _, _ in piece.slices] != [0]:
            return None
        start += piece.slices[0][1]
    return start


def _inexpressible(tensor_map: TensorMap, stacked: set[str], places: dict[str, tuple[str, int]]) -> list[str]:
    """Say what does not go into rows of merged tensors, or does not fill them."""
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
    """Say which keys vLLM would map wrongly, since it looks for entries anywhere in a key, one after the other."""
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


_PLAIN_NAME = re.compile(r"[A-Za-z0-9_\-.]+")


def weight_converters(tensor_map: TensorMap) -> list[Any]:
    """Return converters of transformers; see `KeyMap.weight_converters`."""
    for row in tensor_map.originals:
        if not row.kept and not _PLAIN_NAME.fullmatch(row.key):
            raise FxoptError(f"`{row.key}` has characters that mean something else in the patterns of transformers")
    try:
        library = importlib.import_module("transformers.core_model_loading")
    except ImportError as error:
        raise FxoptError(
            f"KeyMap.weight_converters needs transformers 5, which cannot be imported here ({error}): pip install "
            "'transformers>=5'"
        ) from error
    operation: Any = type("KeyMapConversion", (KeyMapConversion, library.ConversionOps), {})
    return [
        library.WeightConverter(
            [pattern_of(key) for key in part.by_key],
            [pattern_of(key) for key in new_keys(part)],
            operations=[operation(part)],
        )
        for part in independent_parts(tensor_map)
    ]


def independent_parts(tensor_map: TensorMap) -> list[TensorMap]:
    """Return maps for the groups of tensors that have nothing to do with each other; what is kept is in none."""
    root: dict[str, str] = {}

    def find(label: str) -> str:
        root.setdefault(label, label)
        while root[label] != label:
            root[label] = label = root[root[label]]
        return label

    for step in tensor_map.steps:
        first, *others = [*(target.label for target in step.targets), *step.sources]
        for label in others:
            root[find(label)] = find(first)
    parts: dict[str, tuple[list[OriginalTensor], list[Step], list[tuple[str, ...]]]] = {}
    for row in _moved(tensor_map):
        label = tensor_map.source_of(row.key) if row.beside is None else row.beside
        parts.setdefault(find(label), ([], [], []))[0].append(row)
    for step in tensor_map.steps:
        parts.setdefault(find(step.targets[0].label), ([], [], []))[1].append(step)
    for tie in tensor_map.ties:
        parts.setdefault(find(tie[0]), ([], [], []))[2].append(tie)
    return [TensorMap(tuple(rows), tuple(steps), tuple(ties)) for rows, steps, ties in parts.values() if rows]


class KeyMapConversion:
    """A key map as an operation of transformers: from original tensors to new ones, or backwards, with exact sizes.

    `weight_converters` makes it a subclass of ``ConversionOps``, too.
    """

    supports_many_to_many = True

    def __init__(self, tensor_map: TensorMap, backwards: bool = False) -> None:
        self.tensor_map, self.backwards = tensor_map, backwards

    def __deepcopy__(self, memo: dict[int, Any]) -> KeyMapConversion:
        """Return itself: transformers copies converters for every key, and nothing of this one changes."""
        return self

    def __repr__(self) -> str:
        """Return what it converts."""
        sides = [", ".join(keys) for keys in (self.tensor_map.by_key, new_keys(self.tensor_map))]
        return f"KeyMapConversion({' -> '.join(reversed(sides) if self.backwards else sides)})"

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """Return the tensors on the other side by full name, in the order of ``target_patterns``, which are full names.

        ``input_dict`` has the tensors on this side, or lists of one, by pattern.
        """
        given: dict[str, Tensor] = {}
        for key in new_keys(self.tensor_map) if self.backwards else self.tensor_map.by_key:
            values = input_dict.pop(pattern_of(key), None)
            if values is not None and len(values):
                given[key] = values[0] if isinstance(values, list) else values
        found = self._take_apart(given) if self.backwards else self._put_together(given)
        return {name: found[name] for name in target_patterns}

    def _put_together(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        for group in self.tensor_map.ties:
            first = next((given[key] for key in group if key in given), None)
            given |= {} if first is None else dict.fromkeys(group, first)
        found = {each.target.name: each.build() for each in NewTensors(self.tensor_map, given.get) if each.complete}
        if any(key not in found for key in new_keys(self.tensor_map)):
            missing = [row.key for row in self.tensor_map.originals if row.beside is None and row.key not in given]
            raise CheckpointError(f"the checkpoint lacks {listed(missing)}", missing_keys=missing)
        return found

    def _take_apart(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        missing = [key for key in new_keys(self.tensor_map) if key not in given]
        if missing:
            raise CheckpointError(f"the state_dict lacks {listed(missing)}")
        taken = OriginalTensors(self.tensor_map, given, {row.key: row.dtype for row in self.tensor_map.originals})
        error = taken.error()
        if error is not None:
            raise error
        return {row.key: taken.copy_of(row) for row in self.tensor_map.originals}

    @property
    def reverse_op(self) -> KeyMapConversion:
        """The operation the other way round."""
        return type(self)(self.tensor_map, not self.backwards)


def new_keys(tensor_map: TensorMap) -> list[str]:
    """Return the keys that the steps make, in order."""
    return [target.name for target in tensor_map.new_tensors]


def pattern_of(key: str) -> str:
    r"""Return a pattern that fits one full name alone, and that transformers turns back into it.

    >>> pattern_of("layer.0.q.weight")
    '^layer\\.0\\.q\\.weight(?!.)'
    """
    return f"^{key.replace('.', chr(92) + '.')}(?!.)"
