"""A typed walk over a graph, and the check that an argument is a graph module."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Graph, GraphModule, Node

from fxopt_core.errors import PreconditionError
from fxopt_core.naming import type_text


def iter_nodes(graph: Graph) -> Iterator[Node]:
    """Return the nodes of a graph in order, typed.

    ``for node in graph.nodes`` is typed ``Any`` in torch, so that a type checker sees nothing inside such a loop.
    Nodes may be erased or inserted while walking, as with ``graph.nodes``.

    >>> import torch
    >>> graph = torch.fx.symbolic_trace(torch.nn.ReLU()).graph
    >>> [node.op for node in iter_nodes(graph)]
    ['placeholder', 'call_function', 'output']
    """
    return iter(graph.nodes)


def check_graph_module(graph_module: object, doing: str) -> None:
    """Check that an argument is a graph module; ``doing`` names the operation in the message."""
    if isinstance(graph_module, GraphModule):
        return
    remedy = "capture the model first, for example by fxopt.capture(model, args). What fxopt.optimize returns for "
    remedy += "a SentenceTransformer or a pipeline has it as `transformers_model` or `model`; with also=, in `graphs`"
    raise PreconditionError(f"{doing} is given {type_text(graph_module)}, expected a torch.fx.GraphModule: {remedy}")
