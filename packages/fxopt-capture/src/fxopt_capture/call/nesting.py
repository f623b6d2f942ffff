"""How the containers of an argument are nested, which is as much a part of a captured graph as its operators."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from fxopt_core import with_article
from fxopt_core.errors import CaptureError

_MAPPINGS = (dict, OrderedDict, defaultdict)


@dataclass(frozen=True)
class Nesting:
    """A container that torch's pytrees know: its type, its context (keys, names of fields), and what is in it."""

    kind: Any
    context: Any
    entries: tuple[Nesting | None, ...]

    def __str__(self) -> str:
        """Return the container in words: ``a list of 2``."""
        name = with_article(self.kind.__name__)
        return f"{name} with the keys {self.keys()}" if self.kind in _MAPPINGS else f"{name} of {len(self.entries)}"

    def keys(self) -> list[Any]:
        """Return the keys or indices of the entries."""
        if self.kind not in _MAPPINGS:
            return list(range(len(self.entries)))
        return list(self.context[1] if self.kind is defaultdict else self.context)


def nesting_of(value: object) -> Nesting | None:
    """Return how a value is made up of containers; None if it is not one.

    >>> print(nesting_of([1, {"a": 2}]), nesting_of({"a": 2}), nesting_of(3), sep="; ")
    a list of 2; a dict with the keys ['a']; None
    """

    def nesting(spec: pytree.TreeSpec) -> Nesting | None:
        # torch has one type for all named tuples
        kind = spec.context if spec.type is namedtuple else spec.type
        return None if spec.is_leaf() else Nesting(kind, spec.context, tuple(map(nesting, spec.children())))

    return nesting(pytree.tree_structure(value))


def other_nesting(found: Nesting | None, expected: Nesting | None, name: str) -> tuple[str, str, str] | None:
    """Return where containers first differ in type, length, keys or other contents, and both in words; else None.

    Types and orders count, since a model may branch on whether it gets a list or a tuple, and may iterate over a
    dictionary.

    >>> other_nesting(nesting_of([1, [2]]), nesting_of([1, (2,)]), "x")
    ('x[1]', 'a list of 1', 'a tuple of 1')
    """
    if found is None or expected is None:
        text, wanted = (str(each or "a tensor or constant") for each in (found, expected))
        return None if found is expected else (name, text, wanted)
    if (found.kind, len(found.entries), found.context) != (expected.kind, len(expected.entries), expected.context):
        text, wanted = str(found), str(expected)
        return name, text, f"{wanted} and other contents" if text == wanted else wanted
    entries = zip(found.keys(), found.entries, expected.entries, strict=True)
    differences = (other_nesting(one, other, f"{name}[{key!r}]") for key, one, other in entries)
    return next((difference for difference in differences if difference is not None), None)


def check_nesting(value: object, expected: Nesting | None, name: str, model_name: str) -> None:
    """Refuse a value whose containers are nested in another way than at capture; `name` is for messages.

    >>> check_nesting([1, 2], nesting_of([1]), "x", "Model")
    Traceback (most recent call last):
    fxopt_core.errors.CaptureError: argument `x` of the captured Model is a list of 2, where it was captured with a...
    """
    difference = other_nesting(nesting_of(value), expected, name)
    if difference is not None:
        place, text, wanted = difference
        raise CaptureError(
            f"argument `{place}` of the captured {model_name} is {text}, where it was captured with {wanted}; pass "
            f"that, or capture the model again with what it is to take"
        )
