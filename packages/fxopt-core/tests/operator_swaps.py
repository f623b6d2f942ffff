"""A reversible pass that edits by hand, so that only itself undoes it."""

from __future__ import annotations

import operator

from torch.fx import GraphModule

from fxopt_core import ReversibleTransformation, iter_nodes


class Swap(ReversibleTransformation):
    """``x + y`` -> ``x * y`` and so on: the operation of one name becomes that of the other."""

    def __init__(self, old: str = "add", new: str = "mul") -> None:
        self.old, self.new = old, new

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in iter_nodes(graph_module.graph):
            if node.target is getattr(operator, self.old):
                node.target = getattr(operator, self.new)
                self.mark_as_transformed(node)
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        for node in self.get_transformed_nodes(graph_module):
            node.target = getattr(operator, self.old)
            self.mark_as_restored(node)
        return graph_module
