"""Nodes of a graph that make the same view of a value, such as layers that each reshape their input.

``a = x.view(-1, 4); b = x.view(-1, 4)``: the readers of ``b`` could read ``a``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fxopt_rewrite.effects.analysis import Effects
from fxopt_rewrite.ops.vocabulary import called

VIEWS = frozenset(
    {"view", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze", "flatten", "unflatten", "size"}
)
"""Views that are determined by their arguments, and ``size``, whose results they take."""

_PLAIN = (Node, int, str, bool, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)


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
            key = call_key(node, self._firsts)
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


def is_view(node: Node) -> bool:
    """Return whether a node is a view or a size, which can be removed once nothing reads it."""
    target = called(node)
    if target is None or target.inplace:
        return False
    return _is_size(node) if target.name == "getitem" else target.name in VIEWS


def _is_size(node: object) -> bool:
    """Return whether a node is the shape of a value, or an item of one, or an item of a part of one."""
    for _ in range(3):
        target = called(node) if isinstance(node, Node) else None
        if target is None or not isinstance(node, Node) or target.name != "getitem":
            return target is not None and target.name == "size"
        node = node.args[0]
    return False


def _may_have_a_twin(node: Node, candidates: Container[Node]) -> bool:
    """Return whether another node may make the same view: the input has other users, or may itself be made twice."""
    value = node.args[0] if node.args else None
    return not isinstance(value, Node) or len(value.users) > 1 or value in candidates


def call_key(node: Node, firsts: Mapping[Node, Node]) -> Hashable | None:
    """Return what equal calls have in common, or None; nodes in ``firsts`` count as those that they stand for there."""
    arguments = _hashable(map_arg((node.args, node.kwargs), lambda value: firsts.get(value, value)))
    target = node.target if isinstance(node.target, str) else id(node.target)
    return None if arguments is None else (node.op, target, arguments)


def _hashable(value: Any) -> Hashable | None:
    """Return arguments as a hashable key, in which 1, 1.0 and True differ, and 0.0 and -0.0; None if they have none."""
    if isinstance(value, (list, tuple)):
        items = tuple(_hashable(item) for item in value)
        return None if None in items else ("sequence", items)
    if isinstance(value, Mapping):
        pairs = sorted(value.items(), key=lambda pair: repr(pair[0]))  # keys may be of several kinds
        return _hashable([item for pair in pairs for item in pair])
    if isinstance(value, slice):
        items = tuple(_hashable(item) for item in (value.start, value.stop, value.step))
        return None if None in items else ("slice", items)
    if type(value) is float:
        return "float", value.hex() if math.isfinite(value) else repr(value)
    return (type(value).__name__, value) if isinstance(value, _PLAIN) else None
