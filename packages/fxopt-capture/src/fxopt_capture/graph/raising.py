"""Raise operator calls with parameters back to the layers that made them.

``aten.linear(x, layer.weight, layer.bias)`` -> ``layer(x)``

A call is raised only if a layer of exactly this class, without hooks or a patched ``forward``, holds the very tensors
of the call and would pass every other argument as the call does. All others stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from fxopt_capture._torch import BatchNorm
from fxopt_capture.graph.shells import attribute, running, value_of
from fxopt_core import iter_nodes
from fxopt_rewrite import Operation, TensorRef, computed_by, read_call

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


_RAISED = frozenset(
    {
        *("linear", "batch_norm", "layer_norm", "group_norm", "embedding"),
        *(f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3)),
    }
)


def raise_layers(graph: Graph, model: nn.Module) -> list[nn.Module]:
    """Replace the operator calls of `graph` that layers of `model` made by calls of these layers; return the layers.

    Names in the graph's ``get_attr`` nodes are those of the model.
    """
    owners = _Owners(model)
    steps = _CounterSteps(model)
    raised: dict[int, nn.Module] = {}
    for node in iter_nodes(graph):
        operation = read_call(node) if isinstance(node.target, torch._ops.OpOverload) else None
        if operation is None or operation.name not in _RAISED:
            steps.see(node)
            continue
        found = owners.of(operation)
        if found is not None and steps.consume(found[1]):
            with graph.inserting_before(node):
                new = graph.create_node("call_module", found[0], (operation.input,))
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            raised[id(found[1])] = found[1]
    return list(raised.values())


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

    def of(self, operation: Operation) -> tuple[str, nn.Module] | None:
        """Return name and module of the layer whose call this is."""
        arguments = {name: value_of(self.model, value) for name, value in operation.arguments.items()}
        for name in self._candidates(operation.node, arguments):
            layer = self.modules.get(name) if name else None  # no node can call the root itself
            if layer is not None and _is_plain(layer) and _made(layer, operation, arguments):
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


def _made(layer: nn.Module, operation: Operation, arguments: dict[str, Any]) -> bool:
    """Return whether a layer calls this operation with these arguments: the very tensors, and equal settings."""
    computed = computed_by(layer, operation.node)
    if computed is None or computed[0] != operation.name or operation.input is None:
        return False
    expected = {key: each.tensor if isinstance(each, TensorRef) else each for key, each in computed[1].items()}
    if isinstance(layer, BatchNorm):
        expected |= _settings(layer)
    given = {**arguments, "input": operation.node}
    return given.keys() == expected.keys() and all(_agrees(given[key], value) for key, value in expected.items())


def _settings(layer: Any) -> dict[str, object]:
    """Return the arguments that a batch norm computes from its attributes, instead of passing them on."""
    averages = layer.training and layer.track_running_stats and layer.momentum is None  # by a factor of each call's
    used = {} if not layer.training or layer.track_running_stats else {"running_mean": None, "running_var": None}
    training = layer.training or (layer.running_mean is None and layer.running_var is None)
    return {**used, "training": training, "momentum": None if averages else layer.momentum or 0.0}


def _agrees(found: Any, expected: object) -> bool:
    if isinstance(found, torch.Tensor | Node) or isinstance(expected, torch.Tensor):
        return found is expected
    if expected == "valid":  # padding
        return found == "valid" or not any(found)
    return type(found) is type(expected) and found == expected


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
        """Erase the step that the layer will make itself; return False if there is none."""
        counter = getattr(layer, "num_batches_tracked", None)
        if not isinstance(layer, BatchNorm) or not layer.training or counter is None:
            return True
        steps = self.pending.get(id(counter))
        if not steps:
            return False
        step = steps.pop()
        step.graph.erase_node(step)
        return True
