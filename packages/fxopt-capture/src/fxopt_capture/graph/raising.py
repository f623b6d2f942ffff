"""Raise operator calls with parameters back to the layers that made them.

``aten.linear(x, layer.weight, layer.bias)`` -> ``layer(x)``

A call is raised only if a layer of exactly this class, without hooks or a patched ``forward``, holds the very tensors
of the call and would pass every other argument as the call does. All other calls stay as they are, and so do batch
norms in training mode.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from fxopt_capture._torch import BatchNorm
from fxopt_capture.graph.shells import value_of
from fxopt_core import iter_nodes
from fxopt_rewrite import Operation, TensorRef, computed_by, is_plain_module, module_running, read_call

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
    modules = dict(model.named_modules(remove_duplicate=False))
    del modules[""]  # no node can call the root itself
    holders: dict[int, list[str]] = defaultdict(list)
    for name, module in modules.items():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            holders[id(tensor)].append(name)
    raised: dict[int, nn.Module] = {}
    for node in iter_nodes(graph):
        operation = read_call(node) if isinstance(node.target, torch._ops.OpOverload) else None
        if operation is None or operation.name not in _RAISED:
            continue
        arguments = {name: value_of(model, value) for name, value in operation.arguments.items()}
        held = [holders[id(value)] for value in arguments.values() if isinstance(value, torch.Tensor)]
        # Layers with tied weights hold the same tensor, and the one that ran comes first.
        names = (name for name in (module_running(node), *chain.from_iterable(held)) if name in modules)
        name = next((name for name in names if _made(modules[name], operation, arguments)), None)
        if name is None:
            continue
        layer = modules[name]
        with graph.inserting_before(node):
            new = graph.create_node("call_module", name, (operation.input,))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        raised[id(layer)] = layer
    return list(raised.values())


def _made(layer: nn.Module, operation: Operation, arguments: dict[str, Any]) -> bool:
    """Return whether a layer calls this operation with these arguments: the very tensors, and equal settings."""
    if not is_plain_module(layer) or (isinstance(layer, BatchNorm) and layer.training):  # which also counts its calls
        return False
    computed = computed_by(layer, operation.node)
    if computed is None or computed[0] != operation.name or operation.input is None:
        return False
    expected = {key: each.tensor if isinstance(each, TensorRef) else each for key, each in computed[1].items()}
    if isinstance(layer, BatchNorm):
        # As `_BatchNorm.forward` has them in eval mode: it normalises by the batch if there are no statistics.
        expected |= {"training": layer.running_mean is None and layer.running_var is None}
        expected["momentum"] = layer.momentum or 0.0
    given = {**arguments, "input": operation.node}
    return given.keys() == expected.keys() and all(_agrees(given[key], value) for key, value in expected.items())


def _agrees(found: Any, expected: object) -> bool:
    if isinstance(found, torch.Tensor | Node) or isinstance(expected, torch.Tensor):
        return found is expected
    if expected == "valid":  # padding
        return found == "valid" or not any(found)
    return type(found) is type(expected) and found == expected
