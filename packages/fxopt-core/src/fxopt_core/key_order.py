"""Order of keys: take entries out of a dictionary, and put them back where they were, without walking it each time."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

V = TypeVar("V")


class KeyOrder(Generic[V]):
    """A dictionary whose order of keys is kept as a linked list.

    >>> order = KeyOrder({"a": 1, "b": 2, "c": 3})
    >>> order.remove("b")
    'a'
    >>> order.insert_after("a", "b", 4)
    >>> order.apply()
    >>> order.mapping
    {'a': 1, 'b': 4, 'c': 3}
    """

    def __init__(self, mapping: dict[str, V]) -> None:
        self.mapping = mapping
        keys: list[str | None] = [None, *mapping]
        self._next: dict[str | None, str | None] = dict(zip(keys, [*mapping, None], strict=True))
        self._previous: dict[str | None, str | None] = dict(zip([*mapping, None], keys, strict=True))
        self._moved = False

    def _link(self, first: str | None, second: str | None) -> None:
        self._next[first] = second
        self._previous[second] = first

    def append(self, key: str, value: V) -> None:
        """Add an entry at the end."""
        self._link(self._previous[None], key)
        self._link(key, None)
        self.mapping[key] = value

    def remove(self, key: str) -> str | None:
        """Take an entry out; return the key that stood before it."""
        del self.mapping[key]
        previous = self._previous.pop(key)
        self._link(previous, self._next.pop(key))
        return previous

    def before(self, key: str) -> str | None:
        """Return the key that stands before one, None for the first."""
        return self._previous[key]

    def insert_after(self, previous: str | None, key: str, value: V) -> None:
        """Put an entry in behind another one; at the end where that one is gone."""
        if previous not in self._next:
            self.append(key, value)
            return
        following = self._next[previous]
        self._link(previous, key)
        self._link(key, following)
        self.mapping[key] = value
        self._moved = True

    def apply(self) -> None:
        """Bring the dictionary itself into this order."""
        if not self._moved:
            return
        ordered: dict[str, V] = {}
        key = self._next[None]
        while key is not None:
            ordered[key] = self.mapping[key]
            key = self._next[key]
        self.mapping.clear()
        self.mapping.update(ordered)
        self._moved = False


class KeyOrders:
    """The order of each dictionary that is asked for, made once."""

    def __init__(self) -> None:
        self._known: dict[int, KeyOrder[Any]] = {}

    def of(self, mapping: dict[str, Any]) -> KeyOrder[Any]:
        """Return the order of a dictionary, which stays alive with this."""
        found = self._known.get(id(mapping))
        if found is None:
            found = self._known[id(mapping)] = KeyOrder(mapping)
        return found

    def apply(self) -> None:
        """Bring all dictionaries into their order."""
        for order in self._known.values():
            order.apply()
