"""What to do about a checkpoint whose keys are not those of the original model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any


def advice(state_dict: Mapping[Any, Any], missing: Collection[str], unexpected: Collection[str]) -> str | None:
    """Return what makes a checkpoint fit, if its keys tell: they have a prefix, or lack one, or are one level deeper.

    Args:
        state_dict: the checkpoint.
        missing: the keys that it lacks.
        unexpected: the keys that it has too much.

    >>> advice({"module.a.bias": 1}, ["a.bias"], ["module.a.bias"])
    "they fit without the prefix `module.`: load {key.removeprefix('module.'): value for key, value in ...items()}"
    >>> advice({"a.bias": 1}, ["model.a.bias"], ["a.bias"])
    "they fit with the prefix `model.`: load {'model.' + key: value for key, value in ...items()}"
    >>> advice({"epoch": 3, "model": {"a.bias": 1}}, ["a.bias"], ["epoch", "model"])
    'its entry `model` is a mapping with such keys: load that one'
    """
    lacking, others = set(missing), set(unexpected) & state_dict.keys()
    for key in others:
        inside = state_dict[key]
        if isinstance(inside, Mapping) and _explains(len(lacking & set(inside)), lacking):
            return f"its entry `{key}` is a mapping with such keys: load that one"
    prefix = _prefix(others, lacking)
    if _explains(sum(prefix + key in others for key in lacking), lacking):
        return (
            f"they fit without the prefix `{prefix}`: load {{key.removeprefix({prefix!r}): value for key, value in "
            "...items()}"
        )
    prefix = _prefix(lacking, others)
    if _explains(sum(prefix + key in lacking for key in others), lacking):
        return f"they fit with the prefix `{prefix}`: load {{{prefix!r} + key: value for key, value in ...items()}}"
    return None


def _explains(fitting: int, lacking: set[str]) -> bool:
    return bool(lacking) and 2 * fitting > len(lacking)


def _prefix(longer: set[str], shorter: set[str]) -> str:
    """Return what stands most often before one of the shorter keys in the longer ones, up to a dot."""
    found: Counter[str] = Counter()
    for key in longer:
        place = key.find(".") + 1
        while place:
            if key[place:] in shorter:
                found[key[:place]] += 1
            place = key.find(".", place) + 1
    return max(found, key=lambda prefix: (found[prefix], prefix), default="")
