"""How the containers of an argument nest, which is as much a part of a captured graph as its operators."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree as pytree

from fxopt_core.errors import CaptureError

_TAGS = frozenset("_tpsv")  # of objects in the contexts that transformers writes
_SEQUENCES = (list, tuple, immutable_list)
_MAPPINGS = (dict, OrderedDict, defaultdict, immutable_dict)


@dataclass(frozen=True)
class Nesting:
    """How one value consists of containers that torch's pytrees see into.

    Attributes:
        kind: the type of the container, None for a value that is none.
        context: what torch's pytrees note of it besides its entries: keys, names of fields.
        entries: the nesting of each entry by its place: a mapping's key, else its position.
        labels: how a caller calls each entry: ``[0]``, ``['mask']``, ``.left``.
    """

    kind: type | None = None
    context: object = None
    entries: Mapping[object, Nesting] = field(default_factory=dict)
    labels: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the container in words: ``a list of 2``."""
        if self.kind is None:
            return "a tensor or constant"
        name = f"a {self.kind.__name__}"
        if self.kind in _SEQUENCES:
            return f"{name} of {len(self.entries)}"
        if self.kind in _MAPPINGS:
            return f"{name} with the keys {list(self.entries)}"
        return f"{name} with {', '.join(self.labels) or 'no entries'}"


def nesting_of(value: Any) -> Nesting:
    """Return the nesting of a value.

    >>> nesting = nesting_of([1, {"a": 2}])
    >>> print(nesting, nesting.entries[1], nesting.entries[0], sep="; ")
    a list of 2; a dict with the keys ['a']; a tensor or constant
    """
    definition = _definition(type(value))
    if definition is None:
        return Nesting()
    items, context = definition.flatten_fn(value)
    labels = [f"[{index}]" for index in range(len(items))]
    if definition.flatten_with_keys_fn is not None:
        labels = [str(key) for key, _ in definition.flatten_with_keys_fn(value)[0]]
    places = list(value) if type(value) in _MAPPINGS else range(len(items))
    entries = {place: nesting_of(item) for place, item in zip(places, items, strict=True)}
    return Nesting(type(value), context, entries, tuple(labels))


def fitted(value: Any, nesting: Nesting, name: str, model_name: str) -> Any:
    """Return `value` with its containers as the graph takes them, where it may differ from them.

    A list may stand for a tuple and the other way round, one mapping for another, and keys may have another order.

    Args:
        value: an argument, or an entry of one.
        nesting: that of the capture.
        name: how the caller calls it, for messages.
        model_name: the model's class, for messages.

    Raises:
        CaptureError: its containers nest in another way.

    >>> fitted({"b": [4], "a": 3}, nesting_of({"a": 1, "b": (2,)}), "x", "Model")
    {'a': 3, 'b': (4,)}
    >>> fitted([1, 2], nesting_of([1]), "x", "Model")
    Traceback (most recent call last):
    fxopt_core.errors.CaptureError: argument `x` of the captured Model is a list of 2, where it was captured with a...
    """
    definition = None if nesting.kind is None else _definition(nesting.kind)
    if nesting.kind is not None and definition is None:
        return value  # a class that this process has not registered; torch says what it lacks
    items = _items(value, nesting)
    if items is None:
        raise _refusal(value, nesting, name, model_name)
    if definition is None:
        return value
    places = zip(nesting.entries.items(), nesting.labels, strict=True)
    new = {place: fitted(items[place], entry, name + label, model_name) for (place, entry), label in places}
    kept = type(value) is nesting.kind and list(items) == list(new) and all(new[place] is items[place] for place in new)
    return value if kept else definition.unflatten_fn(new.values(), nesting.context)


def _items(value: Any, nesting: Nesting) -> Mapping[object, Any] | None:
    """Return the entries of `value` by their places, or None where it is another container than at capture."""
    if isinstance(value, torch.Tensor) or nesting.kind is None:
        return {} if nesting.kind is None and _definition(type(value)) is None else None
    if nesting.kind in _MAPPINGS:
        return value if isinstance(value, Mapping) and value.keys() == nesting.entries.keys() else None
    if nesting.kind in _SEQUENCES:
        is_like = isinstance(value, list | tuple) and len(value) == len(nesting.entries)
        return dict(enumerate(value)) if is_like else None
    definition = _definition(nesting.kind)
    if type(value) is not nesting.kind or definition is None:
        return None
    items, context = definition.flatten_fn(value)
    return dict(enumerate(items)) if len(items) == len(nesting.entries) and context == nesting.context else None


def _refusal(value: Any, nesting: Nesting, name: str, model_name: str) -> CaptureError:
    found = nesting_of(value)
    is_leaf, text, expected = found.kind is None, str(found), str(nesting)
    if text == expected:
        place, one, other = _difference(found.context, nesting.context)
        text, expected = f"{text} and {place or 'with'} {one!r}", f"{place or 'with'} {other!r}"
    return CaptureError(
        f"argument `{name}` of the captured {model_name} is {f'a {type(value).__name__}' if is_leaf else text}, where "
        f"it was captured with {expected}; pass that, or capture the model again with what it is to take"
    )


def _difference(found: object, expected: object, place: str = "") -> tuple[str, object, object]:
    """Return where two contexts differ first, as a path through mappings and lists, and what is there in each."""
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        steps = [(f".{key}" if key not in _TAGS else "", found[key], expected[key]) for key in found]
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        steps = [(f"[{index}]", *pair) for index, pair in enumerate(zip(found, expected, strict=True))]
    else:
        return place.lstrip("."), found, expected
    step, one, other = next(step for step in steps if step[1] != step[2])
    return _difference(one, other, place + step)


def _definition(kind: type) -> pytree.NodeDef | None:
    """Return what torch's pytrees know of a type of container."""
    # They know all named tuples under the function that makes such classes.
    key: Any = namedtuple if pytree.is_namedtuple_class(kind) else kind
    return pytree.SUPPORTED_NODES.get(key)
