"""`Size`: how large a graph module is."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule
from torch.nn.parameter import UninitializedParameter


@dataclass(frozen=True)
class Size:
    """The size of a graph module.

    Attributes:
        nodes: nodes of its graph.
        modules: distinct modules in it, not counting itself.
        parameters: distinct parameters in it.
        parameter_bytes: bytes of their elements; uninitialised ones have none.
    """

    nodes: int
    modules: int
    parameters: int
    parameter_bytes: int

    @staticmethod
    def of(graph_module: GraphModule) -> Size:
        """Return the size of a graph module.

        >>> import torch
        >>> Size.of(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 3))))
        Size(nodes=3, modules=1, parameters=2, parameter_bytes=36)
        """
        modules, parameters = list(graph_module.modules()), list(graph_module.parameters())
        made = (each for each in parameters if not isinstance(each, UninitializedParameter))
        size = sum(each.numel() * each.element_size() for each in made)
        return Size(len(graph_module.graph.nodes), len(modules) - 1, len(parameters), size)
