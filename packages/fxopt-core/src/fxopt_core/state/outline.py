"""`Outline`: the state of a graph module, in as much detail as it takes to see whether it has changed since."""

from __future__ import annotations

import weakref
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy

from fxopt_core._torch import codegen_of
from fxopt_core.state.gc_pause import collector_paused
from fxopt_core.state.graph import GraphRows


class Outline:
    """Nodes with their arguments, modules, tensors and the code generator of a graph module.

    It is separate from `Snapshot`, which a composition takes once and which holds all tensors for the rollback. Each
    pass takes an outline, which holds modules and tensors weakly, so that a pass that drops them frees their memory. It
    holds nodes and arguments strongly, so that they can be compared by identity.

    >>> import torch
    >>> graph_module = torch.fx.symbolic_trace(nn.Linear(2, 2))
    >>> outline = Outline(graph_module)
    >>> outline.changed(graph_module)
    False
    >>> _ = graph_module.eval()
    >>> outline.changed(graph_module)
    True
    """

    def __init__(self, graph_module: GraphModule) -> None:
        with collector_paused():
            self.nodes, self._generator = GraphRows(graph_module.graph), codegen_of(graph_module.graph)
            self._modules, self._references = _modules(graph_module)

    def shapes(self) -> dict[str, Any]:
        """Return the shapes of all parameters and buffers by full name."""
        # A row is (name, training, *tensors); a tensor is (key, requires_grad, version, dtype, device, shape) or
        # (key, None).
        return {f"{row[0]}.{key}" if row[0] else key: shape for row in self._modules for key, *_, shape in row[2:]}

    def changed(self, graph_module: GraphModule) -> bool:
        """Return whether a graph module differs: in nodes, modules, tensors, writes into tensors, or code generator."""
        graph = graph_module.graph
        if codegen_of(graph) is not self._generator or not self.nodes.are_in(graph, exactly=False):
            return True
        modules, references = _modules(graph_module)
        return modules != self._modules or not all(map(is_, references, self._references))


def _modules(graph_module: GraphModule) -> tuple[list[tuple[Any, ...]], list[weakref.ref[Any]]]:
    """Return a row for each module with its tensors, and weak references to all of them.

    Both are the same ones as long as nothing has changed: Python makes one reference for a living object.
    """
    rows: list[tuple[Any, ...]] = []
    references: list[weakref.ref[Any]] = []
    for name, module in graph_module.named_modules(remove_duplicate=False):
        tensors = (*module._parameters.items(), *module._buffers.items())
        rows.append((name, module.training, *[(key, *_state(tensor)) for key, tensor in tensors]))
        references += map(weakref.ref, (module, *[tensor for _, tensor in tensors if tensor is not None]))
    return rows, references


def _state(tensor: Tensor | None) -> tuple[object, ...]:
    if tensor is None:
        return (None,)
    lazy = type(tensor) not in (nn.Parameter, Tensor) and is_lazy(tensor)
    version = None if lazy or tensor.is_inference() else tensor._version
    return tensor.requires_grad, version, tensor.dtype, tensor.device, None if lazy else tuple(tensor.shape)
