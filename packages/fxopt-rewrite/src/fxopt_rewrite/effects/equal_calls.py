"""Which calls are equal: ``x.view(-1, 4)`` twice."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

_PLAIN = (Node, int, str, bool, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)


def call_key(node: Node, firsts: Mapping[Node, Node]) -> Hashable | None:
    """Return what equal calls have in common, or None; nodes in ``firsts`` count as those that they stand for there."""
    arguments = _hashable(map_arg((node.args, node.kwargs), lambda value: firsts.get(value, value)))
    target = node.target if isinstance(node.target, str) else id(node.target)
    return None if arguments is None else (node.op, target, arguments)


def _hashable(value: Any) -> Hashable | None:
    """Return arguments as a hashable key, in which 1, 1.0 and True differ, and 0.0 and -0.0; None if they have none."""
    if isinstance(value, (list, tuple)):
        # A None in the sequence is ("NoneType", None); a bare None says that an item has no key.
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
