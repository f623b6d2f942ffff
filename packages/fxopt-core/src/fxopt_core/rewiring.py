"""Let users of a node read another one, in linear time where a user reads thousands of nodes."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

WIDE = 32
"""How many inputs a node has at least that is changed once for all of them."""


class Rewiring:
    """Redirects users from node to node; those with many inputs get their arguments at `flush`.

    Who is a user of whom is right at any time, so that a node without users may be erased at once. Only the arguments
    of wide nodes name nodes that were erased, until `flush`.
    """

    def __init__(self) -> None:
        self._waiting: dict[Node, dict[Node, Node]] = {}

    def redirect(self, node: Node, replacement: Node) -> None:
        """Let all users of a node read its replacement, but for the replacement itself."""
        wide = {user for user in node.users if len(user._input_nodes) >= WIDE and user is not replacement}
        if not wide and replacement not in node.users:
            node.replace_all_uses_with(replacement)
            return
        node.replace_all_uses_with(
            replacement, delete_user_cb=lambda user: user not in wide and user is not replacement
        )
        for user in wide:
            del node.users[user]
            replacement.users[user] = None
            self._waiting.setdefault(user, {})[node] = replacement

    def current(self, user: Node, value: Node) -> Node:
        """Return what a user reads in truth where its arguments name a node."""
        followed = self._waiting.get(user, {})
        while value in followed:
            value = followed[value]
        return value

    def flush(self, user: Node | None = None) -> None:
        """Give the wide nodes, or one of them, the arguments that they should have."""
        if not self._waiting:
            return
        for each in [*self._waiting] if user is None else [user]:
            if each not in self._waiting:
                continue
            read = partial(self.current, each)
            args: Any = map_arg(each.args, read)
            kwargs: Any = map_arg(each.kwargs, read)
            for value in each._input_nodes:
                value.users[each] = None  # so that torch finds it there
            each.args, each.kwargs = (), {}
            each.args, each.kwargs = args, kwargs
            del self._waiting[each]


def places_of(node: Node, rewiring: Rewiring) -> tuple[tuple[Node, tuple[int, ...]], ...]:
    """Return the users of a node, each with the places among its nested arguments where it reads it."""
    found = []
    for user in node.users:
        places: list[int] = []
        count = 0

        def look(value: Node, user: Node = user, places: list[int] = places) -> Node:
            nonlocal count
            if rewiring.current(user, value) is node:
                places.append(count)
            count += 1
            return value

        map_arg((user.args, user.kwargs), look)
        found.append((user, tuple(places)))
    return tuple(found)


def set_places(user: Node, places: Collection[int], old: Node, new: Node) -> bool:
    """Let a node read ``new`` at places among its nested arguments; return whether it read ``old`` at all of them."""
    wanted, fits, count = frozenset(places), [], 0

    def put(value: Node) -> Node:
        nonlocal count
        here = count in wanted
        count += 1
        if here:
            fits.append(value is old)
        return new if here else value

    arguments: Any = map_arg((user.args, user.kwargs), put)
    if not all(fits) or len(fits) < len(wanted):
        return False
    user.args, user.kwargs = arguments
    return True
