"""Key maps as weight converters of transformers, which is imported only when they are asked for."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from fxopt_core.errors import CheckpointError, NotReversibleError
from fxopt_core.key_arithmetic import NewTensors, OriginalTensors
from fxopt_core.key_map import KeyMap


class KeyMapConversion:
    """A key map as an operation of transformers: from original tensors to new ones, or back, with exact sizes.

    `converters` makes it a subclass of ``ConversionOps``, too.

    Args:
        key_map: what goes where.
        backwards: whether it goes from new tensors to original ones.
    """

    supports_many_to_many = True

    def __init__(self, key_map: KeyMap, backwards: bool = False) -> None:
        self.key_map = key_map
        self.backwards = backwards

    def __deepcopy__(self, memo: dict[int, Any]) -> KeyMapConversion:
        """Return itself: transformers copies converters for every key, and nothing of this one changes."""
        return self

    def __repr__(self) -> str:
        """Return what it converts."""
        one, other = (", ".join(keys) for keys in (original_keys(self.key_map), new_keys(self.key_map)))
        return f"KeyMapConversion({f'{other} -> {one}' if self.backwards else f'{one} -> {other}'})"

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """Return the tensors on the other side by full name.

        Args:
            input_dict: the tensors on this side, or lists of one, by pattern.
            source_patterns: unused.
            target_patterns: the full names in the order in which transformers expects them.
            kwargs: unused.

        Raises:
            CheckpointError: A tensor is missing.
            NotReversibleError: The original values cannot be told.
        """
        keys = new_keys(self.key_map) if self.backwards else original_keys(self.key_map)
        given: dict[str, Tensor] = {}
        for key in keys:
            values = input_dict.pop(pattern_of(key), None)
            if values is not None and len(values):
                given[key] = values[0] if isinstance(values, list) else values
        found = self._take_apart(given) if self.backwards else self._put_together(given)
        return {name: found[name] for name in target_patterns}

    def _put_together(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        for group in self.key_map.ties:
            first = next((given[key] for key in group if key in given), None)
            given |= {} if first is None else dict.fromkeys(group, first)
        found = {each.target.key: each.build() for each in NewTensors(self.key_map, given.get) if each.complete}
        result = {key: found[key] for key in new_keys(self.key_map) if key in found}
        if len(result) < len(new_keys(self.key_map)):
            missing = [row.key for row in self.key_map.originals if row.beside is None and row.key not in given]
            names = ", ".join(f"`{key}`" for key in missing)
            raise CheckpointError(f"the checkpoint lacks {names}", missing_keys=missing)
        return result

    def _take_apart(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        missing = [key for key in new_keys(self.key_map) if key not in given]
        if missing:
            raise CheckpointError(f"the state_dict lacks {', '.join(f'`{key}`' for key in missing)}")
        taken = OriginalTensors(self.key_map, given, {row.key: row.dtype for row in self.key_map.originals})
        values = taken.run()
        if taken.problems:
            raise NotReversibleError("\n".join(taken.problems), pass_name=taken.pass_name)
        device = next(iter(given.values())).device
        result = {}
        for row in self.key_map.originals:
            found = values.get(self.key_map.source_of(row.key))
            zeros = torch.zeros(row.shape or (), dtype=row.dtype, device=device)
            result[row.key] = zeros if found is None else found.new_empty(found.shape).copy_(found)
        return result

    @property
    def reverse_op(self) -> KeyMapConversion:
        """The operation the other way round."""
        return type(self)(self.key_map, not self.backwards)


def original_keys(key_map: KeyMap) -> list[str]:
    """Return the original keys of a key map."""
    return [row.key for row in key_map.originals]


def new_keys(key_map: KeyMap) -> list[str]:
    """Return the keys that a key map makes."""
    return [target.key for target in key_map.new_tensors if target.key is not None]


def pattern_of(key: str) -> str:
    r"""Return a pattern that fits one full name alone, and that transformers turns back into it.

    >>> pattern_of("layer.0.q.weight")
    '^layer\\.0\\.q\\.weight(?!.)'
    """
    return f"^{key.replace('.', chr(92) + '.')}(?!.)"


def converters(key_maps: list[KeyMap]) -> list[Any]:
    """Return a ``WeightConverter`` for each of several key maps.

    Raises:
        ImportError: transformers is not installed, or is older than version 5.
    """
    library = importlib.import_module("transformers.core_model_loading")
    operation: Any = type("KeyMapConversion", (KeyMapConversion, library.ConversionOps), {})
    return [
        library.WeightConverter(
            [pattern_of(key) for key in original_keys(key_map)],
            [pattern_of(key) for key in new_keys(key_map)],
            operations=[operation(key_map)],
        )
        for key_map in key_maps
    ]
