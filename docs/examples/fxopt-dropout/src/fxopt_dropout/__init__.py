"""``dropout(x)`` in eval mode -> ``x``."""

from collections.abc import Iterable

from torch import nn
from torch.fx import GraphModule

from fxopt_core import Transformation, hookimpl, input_of, iter_nodes


class RemoveDropout(Transformation):
    """``dropout(x)`` in eval mode -> ``x``."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Let the users of each dropout read its input."""
        for node in iter_nodes(graph_module.graph):
            if node.op == "call_module":
                module, value = graph_module.get_submodule(str(node.target)), input_of(node)
                if type(module) is nn.Dropout and not module.training and value is not None:
                    node.replace_all_uses_with(value)
                    graph_module.graph.erase_node(node)
        return graph_module


@hookimpl
def fxopt_transformations() -> Iterable[type[Transformation]]:
    """Return the passes of this plugin."""
    return [RemoveDropout]
