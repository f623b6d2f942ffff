"""Nodes of a graph that make the same view of a value, such as layers that each reshape their input.

``a = x.view(-1, 4); b = x.view(-1, 4)``: what reads ``b`` could read ``a``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Hashable
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from fxopt_rewrite.effects.analysis import Effects

VIEWS = frozenset(
    {"view", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze", "flatten", "unflatten", "size", "sym_size"}
)
"""Views that follow from their arguments alone, and the sizes that they take."""


class SameValues:
    """Views with equal arguments, found in one walk over a graph; ``effects`` is called only if two are alike."""

    def __init__(self, nodes: tuple[Node, ...], effects: Callable[[], Effects]) -> None:
        self._effects = effects
        self._firsts: dict[Node, Node] = {}
        made: dict[Hashable, Node] = {}
        candidates: set[Node] = set()
        for node in nodes:
            if not is_view(node) or not _may_have_a_twin(node, candidates):
                continue
            candidates.add(node)
            key = self._key(node)
            if key is None:
                continue
            first = made.setdefault(key, node)
            if first is node:
                continue
            if any(effects().written_between(value, first, node) for value in node.all_input_nodes):
                made[key] = node  # the earlier view has another value
            else:
                self._firsts[node] = first

    def first(self, node: Node, reader: Node) -> Node:
        """Return the first node that makes the value which ``reader`` gets from ``node``, mostly ``node`` itself."""
        first = self._firsts.get(node, node)
        return node if first is node or self._effects().written_between(first, first, reader) else first

    def _key(self, node: Node) -> Hashable | None:

        def stand_in(value: Node) -> Any:
            return self._firsts.get(value, value)

        arguments = _hashable((map_arg(node.args, stand_in), map_arg(node.kwargs, stand_in)))
        return None if arguments is None else (node.op, node.target, arguments)


def is_view(node: Node) -> bool:
    """Return whether a node is a view or a size, which can be removed once nothing reads it."""
    return _name(node) in VIEWS


def _may_have_a_twin(node: Node, candidates: Container[Node]) -> bool:
    """Return whether another node may make the same view: the input has other users, or may have a twin itself."""
    value = node.args[0] if node.args else None
    return not isinstance(value, Node) or len(value.users) > 1 or value in candidates


def _name(node: Node) -> str | None:
    """Return the name of what a node calls, in any form of graph; "size" for ``x.shape`` and items of a shape."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return None
    if node.target is getattr:
        return "size" if node.args[1] == "shape" else None
    if node.target is operator.getitem:
        return "size" if isinstance(node.args[0], Node) and _name(node.args[0]) == "size" else None
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", ""))


def _hashable(value: object) -> Hashable | None:
    """Return arguments as a hashable key, in which 1, 1.0 and True differ; None if they have none."""
    if isinstance(value, (list, tuple)):
        items = tuple(_hashable(item) for item in value)
        return None if None in items else ("sequence", items)
    if isinstance(value, dict):
        return _hashable(tuple(value.items()))
    plain = isinstance(value, (Node, int, float, str, type(None)))
    return (type(value).__name__, value) if plain else None
