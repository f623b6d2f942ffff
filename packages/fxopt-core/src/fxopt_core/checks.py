"""Checks of what users hand over, with errors that say what to do."""

from __future__ import annotations

from torch.fx import GraphModule

from fxopt_core.errors import PreconditionError


def check_graph_module(graph_module: object, doing: str) -> None:
    """Check that what is to be read or changed is a graph module.

    Args:
        graph_module: what was given.
        doing: who was given it.

    Raises:
        PreconditionError: It is none.
    """
    if not isinstance(graph_module, GraphModule):
        raise PreconditionError(
            f"{doing} is given a {type(graph_module).__name__}, expected a torch.fx.GraphModule: capture the model "
            "first, for example by fxopt.symbolic_trace(model) or fxopt.capture(model, args)"
        )
