"""Redirect users from one node to another, in linear time even for users that read thousands of nodes."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from itertools import count
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from fxopt_core import inputs_of
from fxopt_rewrite.ops.names import nodes_in

#: From this number of inputs on, all changes to a node's arguments are made at once.
#: torch goes through all arguments of a user for each input that is replaced.
WIDE = 32


class Rewiring:
    """Redirects users from node to node; those with many inputs get their new arguments at `flush`.

    ``Node.users`` is up to date at any time, so that a node without users can be erased at once. Until `flush`, the
    arguments of wide nodes may name erased nodes.
    """

    def __init__(self) -> None:
        self._waiting: dict[Node, dict[Node, Node]] = {}

    def redirect(self, node: Node, replacement: Node) -> None:
        """Let all users of a node, except its replacement, read the replacement."""
        wide = {user for user in node.users if len(inputs_of(user)) >= WIDE and user is not replacement}
        node.replace_all_uses_with(replacement, lambda user: user not in wide and user is not replacement)
        for user in wide:
            del node.users[user]
            replacement.users[user] = None
            self._waiting.setdefault(user, {})[node] = replacement

    def current(self, user: Node, value: Node) -> Node:
        """Return the node that a user really reads where its arguments name a node."""
        followed = self._waiting.get(user, {})
        while value in followed:
            value = followed[value]
        return value

    def flush(self, user: Node | None = None) -> None:
        """Bring the arguments of all wide nodes, or of one user, up to date."""
        for each in [*self._waiting] if user is None else [user] if user in self._waiting else []:
            read = partial(self.current, each)
            args: Any = map_arg(each.args, read)
            kwargs: Any = map_arg(each.kwargs, read)
            for value in inputs_of(each):
                value.users[each] = None  # where torch expects it, to remove it
            each.args, each.kwargs = (), {}
            each.args, each.kwargs = args, kwargs
            del self._waiting[each]


def places_of(node: Node, rewiring: Rewiring) -> tuple[tuple[Node, tuple[int, ...]], ...]:
    """Return each user of a node with the places among its nested arguments that read the node."""
    found = []
    for user in node.users:
        values = enumerate(nodes_in((user.args, user.kwargs)))
        found.append((user, tuple(place for place, value in values if rewiring.current(user, value) is node)))
    return tuple(found)


def set_places(user: Node, places: Collection[int], old: Node, new: Node) -> bool:
    """Let a user read ``new`` at these places among its nested arguments, if it reads ``old`` at all of them."""
    values, wanted, counted = nodes_in((user.args, user.kwargs)), frozenset(places), count()
    if not all(0 <= place < len(values) and values[place] is old for place in wanted):
        return False
    arguments: Any = map_arg((user.args, user.kwargs), lambda value: new if next(counted) in wanted else value)
    user.args, user.kwargs = arguments
    return True
