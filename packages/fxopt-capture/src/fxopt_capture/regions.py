"""Regions of a model that stay one call in its graph, and hide the layers within from passes."""

from __future__ import annotations

from torch import nn
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from fxopt_core.graph import iter_nodes

from .shells import attribute

_CONTEXTS = {"wrap_with_autocast": "torch.autocast", "wrap_with_set_grad_enabled": "torch.no_grad or enable_grad"}


def hidden_note(graph_module: GraphModule) -> str | None:
    """Return which calls of a graph are regions that compute with parameters, or None where there are none.

    ``torch.export`` keeps what runs under ``torch.autocast``, or without gradients though some could flow into it, as
    graphs within the graph; the branches of ``torch.cond`` and the like as well.
    """
    regions = [node for node in iter_nodes(graph_module.graph) if isinstance(node.target, HigherOrderOperator)]
    hiding = {node: found for node in regions if (found := _parameters(node, graph_module))}
    if not hiding:
        return None
    listed = "; ".join(f"`{node.name}` ({_context(node)}: {', '.join(names)})" for node, names in hiding.items())
    return (
        f"{len(hiding)} of the graph's calls {'is a region' if len(hiding) == 1 else 'are regions'} of the model in "
        f"which passes see no layers: {listed}. Without that context the layers would be calls of their own"
    )


def _context(node: Node) -> str:
    name = str(getattr(node.target, "__name__", node.target))
    return _CONTEXTS.get(name, name)


def _parameters(node: Node, graph_module: GraphModule) -> list[str]:
    names = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
    return [name for name in names if isinstance(attribute(graph_module, name), nn.Parameter)]
