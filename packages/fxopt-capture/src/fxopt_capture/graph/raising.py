"""Raise operator calls with parameters back to the layers that made them.

``aten.linear(x, layer.weight, layer.bias)`` -> ``layer(x)``

A call is raised only where a layer of exactly that class, without hooks or a ``forward`` of its own, holds the very
tensors of the call and would pass every other argument as the call does. All others stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from fxopt_capture._torch import BatchNorm
from fxopt_capture.graph.layers import LAYER_CALLS, LayerCall, agrees, call_arguments
from fxopt_capture.graph.shells import attribute, running, value_of
from fxopt_core import iter_nodes

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def raise_layers(graph: Graph, model: nn.Module) -> list[nn.Module]:
    """Replace the calls of `graph` that layers of `model` made by calls of those layers, and return these, each once.

    Names in the graph's ``get_attr`` nodes are those of the model.
    """
    owners = _Owners(model)
    steps = _CounterSteps(model)
    raised: dict[int, nn.Module] = {}
    for node in iter_nodes(graph):
        call = LAYER_CALLS.get(node.target) if node.op == "call_function" else None
        if call is None:
            steps.see(node)
            continue
        found = owners.of(node, call)
        if found is not None and steps.consume(found[1]):
            _replace(graph, node, *found, call)
            raised[id(found[1])] = found[1]
    return list(raised.values())


def _replace(graph: Graph, node: Node, name: str, layer: nn.Module, call: LayerCall) -> None:
    arguments = call_arguments(_operator(node), node.args, node.kwargs)
    with graph.inserting_before(node):
        new = graph.create_node("call_module", name, (arguments[call.input],))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _operator(node: Node) -> torch._ops.OpOverload:
    if not isinstance(node.target, torch._ops.OpOverload):
        raise TypeError(f"node {node.name} calls {node.target}, which has no schema")
    return node.target


class _Owners:
    """The model's layers, by name and by the tensors that they hold."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.by_tensor: dict[int, list[str]] = {}
        for name, module in self.modules.items():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self.by_tensor.setdefault(id(tensor), []).append(name)

    def of(self, node: Node, call: LayerCall) -> tuple[str, nn.Module] | None:
        """Return name and module of the layer whose call this is."""
        arguments = {
            name: value_of(self.model, value)
            for name, value in call_arguments(_operator(node), node.args, node.kwargs).items()
        }
        for name in self._candidates(node, arguments):
            layer = self.modules.get(name) if name else None  # no node can call the root itself
            if layer is not None and type(layer) in call.classes and _is_plain(layer) and _made(layer, call, arguments):
                return name, layer
        return None

    def _candidates(self, node: Node, arguments: dict[str, Any]) -> Iterator[str]:
        """Yield the module that was running, then whichever holds the call's tensors."""
        yield running(node)
        for value in arguments.values():
            if isinstance(value, torch.Tensor):
                yield from self.by_tensor.get(id(value), ())


def _is_plain(layer: nn.Module) -> bool:
    return "forward" not in vars(layer) and not any(getattr(layer, hooks) for hooks in _HOOKS)


def _made(layer: nn.Module, call: LayerCall, arguments: dict[str, Any]) -> bool:
    expected = call.arguments(layer)
    return expected is not None and all(agrees(arguments[name], value) for name, value in expected.items())


class _CounterSteps:
    """The ``num_batches_tracked += 1`` nodes that batch norms in training mode leave before their call."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.pending: dict[int, list[Node]] = {}

    def see(self, node: Node) -> None:
        """Remember a node that may be such a step."""
        source = node.args[0] if node.args else None
        is_step = node.target is torch.ops.aten.add_.Tensor and node.args[1:] == (1,) and not node.users
        if is_step and isinstance(source, Node) and source.op == "get_attr":
            counter = attribute(self.model, str(source.target))
            self.pending.setdefault(id(counter), []).append(node)

    def consume(self, layer: nn.Module) -> bool:
        """Erase the step that the layer will make itself; False where it is not there."""
        counter = getattr(layer, "num_batches_tracked", None)
        if not isinstance(layer, BatchNorm) or not layer.training or counter is None:
            return True
        steps = self.pending.get(id(counter))
        if not steps:
            return False
        step = steps.pop()
        step.graph.erase_node(step)
        return True
