"""Marks: what fxopt keeps in ``node.meta["fxopt"]``.

One immutable `NodeTag` a node: the signatures of the passes that marked it, and, where a record of the ledger refers to
the node, a number that stays with it when it is renamed, copied or pickled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch.fx import Node

#: The one key that fxopt uses in ``node.meta`` and in ``graph_module.meta``.
META_KEY = "fxopt"


@dataclass(frozen=True)
class NodeTag:
    """What fxopt knows of one node.

    Attributes:
        id: number under which records refer to the node, or None.
        marks: signatures of the passes that marked the node, in the order of marking.
        origin: the pass that made the node and the names of the nodes it stands for, or None.
        name: the node's name when it got its number; it tells the node from others that its meta was copied to.
    """

    id: int | None = None
    marks: tuple[str, ...] = ()
    origin: tuple[str, tuple[str, ...]] | None = None
    name: str | None = None


_EMPTY = NodeTag()


def tag_of(node: Node) -> NodeTag:
    """Return the tag of a node; an empty one if it has none."""
    tag = node.meta.get(META_KEY)
    return tag if isinstance(tag, NodeTag) else _EMPTY


def set_tag(node: Node, tag: NodeTag) -> None:
    """Set the tag of a node; an empty tag removes the entry in ``meta``."""
    if tag == _EMPTY:
        node.meta.pop(META_KEY, None)
    else:
        node.meta[META_KEY] = tag


def forget_ids(nodes: Iterable[Node]) -> None:
    """Remove the numbers of nodes, once no record refers to them."""
    for node in nodes:
        tag = tag_of(node)
        if tag.id is not None:
            # `origin` still needs the name, which tells this node from one that its meta was copied to.
            set_tag(node, replace(tag, id=None, name=tag.name if tag.origin else None))
