"""Dictionaries whose entries are removed and restored at their old places in constant time."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import pairwise
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class KeyOrder(Generic[K, V]):
    """A dictionary whose order of keys is kept as a linked list; keys may be anything but None.

    Lookups see every change at once. The order in which the dictionary itself yields its keys follows at `apply`.

    >>> order = KeyOrder({"a": 1, "b": 2, "c": 3})
    >>> order.remove("b")
    'a'
    >>> order.insert_after("a", "b", 4)
    >>> list(order)
    ['a', 'b', 'c']
    >>> order.apply()
    >>> order.mapping
    {'a': 1, 'b': 4, 'c': 3}
    """

    def __init__(self, mapping: dict[K, V]) -> None:
        self.mapping = mapping
        keys: list[K | None] = [None, *mapping, None]  # None is before the first and after the last
        self._following = dict(pairwise(keys))
        self._previous = {second: first for first, second in pairwise(keys)}
        self._moved = False

    def __iter__(self) -> Iterator[K]:
        key = self._following[None]
        while key is not None:
            yield key
            key = self._following[key]

    def _link(self, first: K | None, second: K | None) -> None:
        self._following[first] = second
        self._previous[second] = first

    def append(self, key: K, value: V) -> None:
        """Add an entry at the end."""
        self._link(self._previous[None], key)
        self._link(key, None)
        self.mapping[key] = value

    def remove(self, key: K) -> K | None:
        """Remove an entry; return the key before it, None if it was the first."""
        del self.mapping[key]
        previous = self._previous.pop(key)
        self._link(previous, self._following.pop(key))
        return previous

    def insert_after(self, previous: K | None, key: K, value: V) -> None:
        """Add an entry after another key, or first for None; at the end if that key is gone."""
        if previous not in self._following:
            self.append(key, value)
            return
        following = self._following[previous]
        self._link(previous, key)
        self._link(key, following)
        self.mapping[key] = value
        # Only here: removing keeps the order of a dictionary, and `append` adds at its end.
        self._moved = True

    def apply(self) -> None:
        """Bring the dictionary itself into this order."""
        if self._moved:
            ordered = {key: self.mapping[key] for key in self}
            self.mapping.clear()
            self.mapping.update(ordered)
            self._moved = False


class KeyOrders:
    """One `KeyOrder` for each dictionary that is asked for."""

    def __init__(self) -> None:
        self._known: dict[int, KeyOrder[Any, Any]] = {}  # by id: each order keeps its dictionary alive

    def of(self, mapping: dict[str, Any]) -> KeyOrder[str, Any]:
        """Return the order of a dictionary; the same object for the same dictionary."""
        if id(mapping) not in self._known:
            self._known[id(mapping)] = KeyOrder(mapping)
        return self._known[id(mapping)]

    def apply(self) -> None:
        """Bring all dictionaries into their order."""
        for order in self._known.values():
            order.apply()
