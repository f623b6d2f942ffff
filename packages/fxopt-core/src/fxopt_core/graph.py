"""A typed walk over a graph, and the check that an argument is a graph module."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
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
    if not isinstance(graph_module, GraphModule):
        raise PreconditionError(
            f"{doing} is given {type_text(graph_module)}, expected a torch.fx.GraphModule: "
            f"{_way_to_a_graph(graph_module)}"
        )


def _way_to_a_graph(found: object) -> str:
    """Say which graph module inside an object, such as a SentenceTransformer, is meant, or how to make one."""
    holders = {name: getattr(found, name, None) for name in ("transformers_model", "model")}
    attribute = next((name for name, value in holders.items() if isinstance(value, nn.Module)), "")
    if isinstance(holders.get(attribute), GraphModule):
        return f"give the one in it, its `{attribute}`"
    modules = found.named_modules() if isinstance(found, nn.Module) else ()
    inner = [name for name, each in modules if isinstance(each, GraphModule)]
    outer = [name for name in inner if not any(name.startswith(f"{other}.") for other in inner)]
    if outer:
        those = "the one in it, its" if len(outer) == 1 else "the ones in it one by one, its"
        return f"give {those} {', '.join(f'get_submodule({name!r})' for name in outer)}"
    if attribute and (attribute != "model" or not isinstance(found, nn.Module)):
        return f"optimize it first, fast = fxopt.optimize(model), and give fast.{attribute}"
    return "capture the model first, for example by fxopt.symbolic_trace(model) or fxopt.capture(model, args)"
