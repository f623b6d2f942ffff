"""Which values are rounded, compared or turned into integers later, so that their last bit matters."""

from __future__ import annotations

from torch.fx import Node

from fxopt_arith.rounding_calls import rounds, stops
from fxopt_core import GraphIndex


class RoundedValues:
    """Finds, for every node, a later one that rounds or compares what it computes; linear in the size of the graph.

    The search goes through all operations but those that mix many values (matrix products, softmax, normalisations),
    and through memory that is written in place. What an opaque call does is not known, so it counts as rounding.
    """

    def __init__(self, index: GraphIndex) -> None:
        effects = {node: index.effects.effect(node) for node in index.nodes}
        memory: dict[Node, Node] = {}
        for node, effect in effects.items():
            alias = None if effect.opaque else next(iter(effect.aliases), None)
            memory[node] = node if alias is None else memory[alias]
        rounded: dict[Node, Node] = {}
        self._by: dict[Node, Node] = {}
        for node, effect in reversed(effects.items()):
            targets = [memory[node], *(memory[written] for written in effect.writes)]
            later = next((rounded[value] for value in targets if value in rounded), None)
            if later is not None:
                self._by[node] = later
            name = None if effect.opaque else effect.operation
            for value in node.all_input_nodes:
                source = node if rounds(index, node, name, value) else None if stops(node, name) else later
                if source is not None:
                    rounded.setdefault(memory[value], source)

    def by(self, node: Node) -> Node | None:
        """Return a node that rounds or compares the value of a node later, or None."""
        return self._by.get(node)
