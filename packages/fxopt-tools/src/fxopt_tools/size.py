"""`Size`: how large a graph module is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.fx import GraphModule
from torch.nn.parameter import UninitializedParameter


@dataclass(frozen=True)
class Size:
    """The size of a module.

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
    def of(module: nn.Module) -> Size:
        """Return the size of a module; without a graph, it has no nodes.

        >>> import torch
        >>> Size.of(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 3))))
        Size(nodes=3, modules=1, parameters=2, parameter_bytes=36)
        """
        nodes = len(module.graph.nodes) if isinstance(module, GraphModule) else 0
        modules, parameters = list(module.modules()), list(module.parameters())
        made = (each for each in parameters if not isinstance(each, UninitializedParameter))
        size = sum(each.numel() * each.element_size() for each in made)
        return Size(nodes, len(modules) - 1, len(parameters), size)


def operations_text(operations: Iterable[tuple[str, int, int]]) -> str:
    """Return what changed in a line, or "unchanged".

    >>> operations_text([("Linear", 37, 0), ("PanelLinear", 0, 25), ("add", 3, 3)])
    'Linear 37 -> 0, PanelLinear 0 -> 25'
    """
    changed = [f"{kind} {old} -> {new}" for kind, old, new in operations if old != new]
    return ", ".join(changed[:6] + ["..."] * (len(changed) > 6)) or "unchanged"
