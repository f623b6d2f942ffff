"""How the containers of an argument are nested, which is as much a part of a captured graph as its operators."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree as pytree

from fxopt_core import (
    type_text,
    with_article,
)
from fxopt_core.errors import CaptureError

_TAGS = frozenset("_tpsv")  # of objects in the contexts that transformers writes
_SEQUENCES = (list, tuple, immutable_list)
_MAPPINGS = (dict, OrderedDict, defaultdict, immutable_dict)


@dataclass(frozen=True)
class Nesting:
    """How a value is made up of containers that torch's pytrees know.

    Attributes:
        kind: the type of the container, None for a value that is not a container.
        context: its context in torch's pytrees, besides its entries: keys, names of fields.
        entries: the nesting of each entry.
        labels: the access to each entry in code: ``[0]``, ``['mask']``, ``.left``.
    """

    kind: type | None = None
    context: object = None
    entries: tuple[Nesting, ...] = ()
    labels: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the container in words: ``a list of 2``."""
        if self.kind is None:
            return "a tensor or constant"
        name = with_article(self.kind.__name__)
        if self.kind in _SEQUENCES:
            return f"{name} of {len(self.entries)}"
        if self.kind in _MAPPINGS:
            return f"{name} with the keys [{', '.join(label[1:-1] for label in self.labels)}]"
        return f"{name} with {', '.join(self.labels) or 'no entries'}"


def nesting_of(value: Any) -> Nesting:
    """Return the nesting of a value.

    >>> nesting = nesting_of([1, {"a": 2}])
    >>> print(nesting, *reversed(nesting.entries), sep="; ")
    a list of 2; a dict with the keys ['a']; a tensor or constant
    """
    definition = _definition(type(value))
    if definition is None:
        return Nesting()
    items, context = definition.flatten_fn(value)
    labels = [f"[{index}]" for index in range(len(items))]
    if definition.flatten_with_keys_fn is not None:
        labels = [str(key) for key, _ in definition.flatten_with_keys_fn(value)[0]]
    return Nesting(type(value), context, tuple(map(nesting_of, items)), tuple(labels))


def check_nesting(value: Any, nesting: Nesting, name: str, model_name: str) -> None:
    """Refuse a value whose containers are nested in another way than at capture.

    Types and orders count, since a model may branch on whether it gets a list or a tuple, and may iterate over a
    dictionary.

    Args:
        value: an argument, or an entry of one.
        nesting: the nesting at capture.
        name: the name of the value for the caller, for messages.
        model_name: the model's class, for messages.

    >>> check_nesting({"a": 3, "b": (4,)}, nesting_of({"a": 1, "b": (2,)}), "x", "Model")
    >>> check_nesting([1, 2], nesting_of([1]), "x", "Model")
    Traceback (most recent call last):
    fxopt_core.errors.CaptureError: argument `x` of the captured Model is a list of 2, where it was captured with a...
    """
    definition = None if nesting.kind is None else _definition(nesting.kind)
    if nesting.kind is not None and definition is None:
        return  # a class that this process has not registered; torch says what it lacks
    items = _items(value, nesting, definition)
    if items is None:
        raise _refusal(value, nesting, name, model_name)
    for item, entry, label in zip(items, nesting.entries, nesting.labels, strict=True):
        check_nesting(item, entry, name + label, model_name)


def _items(value: Any, nesting: Nesting, definition: pytree.NodeDef | None) -> list[Any] | None:
    """Return the entries of `value`, or None if it is another container than at capture."""
    if definition is None:
        is_leaf = isinstance(value, torch.Tensor) or _definition(type(value)) is None
        return [] if is_leaf else None
    if type(value) is not nesting.kind:
        return None
    items, context = definition.flatten_fn(value)
    return items if len(items) == len(nesting.entries) and context == nesting.context else None


def _refusal(value: Any, nesting: Nesting, name: str, model_name: str) -> CaptureError:
    found = nesting_of(value)
    is_leaf, text, expected = found.kind is None, str(found), str(nesting)
    if text == expected:
        place, one, other = context_difference(found.context, nesting.context)
        text, expected = f"{text} and {place or 'with'} {one!r}", f"{place or 'with'} {other!r}"
    return CaptureError(
        f"argument `{name}` of the captured {model_name} is {type_text(value) if is_leaf else text}, where "
        f"it was captured with {expected}; pass that, or capture the model again with what it is to take"
    )


def context_difference(found: object, expected: object, place: str = "") -> tuple[str, object, object]:
    """Return where two contexts first differ, as a path through mappings and lists, and the two values there."""
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        steps = [(f".{key}" if key not in _TAGS else "", found[key], expected[key]) for key in found]
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        steps = [(f"[{index}]", *pair) for index, pair in enumerate(zip(found, expected, strict=True))]
    else:
        return place.lstrip("."), found, expected
    step, one, other = next(step for step in steps if step[1] != step[2])
    return context_difference(one, other, place + step)


def _definition(kind: type) -> pytree.NodeDef | None:
    """Return the definition of a type of container in torch's pytrees, or None."""
    # All named tuples are registered under the function that makes such classes.
    key: Any = namedtuple if pytree.is_namedtuple_class(kind) else kind
    return pytree.SUPPORTED_NODES.get(key)
