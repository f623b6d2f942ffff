"""Readers of layer norms and RMS norms in every form of graph."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Node

from fxopt_rewrite.calls.readers import arguments_of, module_tensor, owner_of, read_module, tensor_ref, trains
from fxopt_rewrite.calls.records import LayerNormCall, Obstacle, TensorRef
from fxopt_rewrite.index import GraphIndex
from fxopt_rewrite.ops import forms


def read_layer_norm(index: GraphIndex, node: Node) -> LayerNormCall | Obstacle | None:
    """Read a layer norm: ``nn.LayerNorm``, or ``layer_norm`` of ``F``, ``torch`` or ``aten``.

    RMS norms are read, too (``nn.RMSNorm``, ``rms_norm``), as calls that are not ``centred``.

    >>> import torch
    >>> index = GraphIndex(torch.fx.symbolic_trace(nn.Sequential(nn.LayerNorm(4))))
    >>> call = read_layer_norm(index, index.nodes[1])
    >>> call.label, call.normalized_shape, call.centred
    ('0', (4,), True)
    """
    if node.op == "call_module":
        return read_module(index, node, (nn.LayerNorm, nn.RMSNorm), _view)
    if node.op == "call_function" and node.target in forms.DECOMPOSED_LAYER_NORMS:
        message = f"node `{node.name}` is a normalisation that was decomposed, into `{node.target}`"
        return Obstacle(node.name, "decomposed", message)
    arguments = arguments_of(node, forms.LAYER_NORM_TARGETS)
    if arguments is None:
        return None
    refs: list[TensorRef | None] = []
    for name in ("weight", "bias"):
        ref = tensor_ref(index, node, arguments.get(name), name, parameter=True)
        if isinstance(ref, Obstacle):
            return ref
        refs.append(ref)
    centred = forms.LAYER_NORM_TARGETS[node.target] is forms.LAYER_NORM
    value, sizes = arguments.get("input"), arguments.get("normalized_shape")
    eps = arguments.get("eps", 1e-5 if centred else None)
    fixed = isinstance(sizes, list | tuple) and all(type(size) is int for size in sizes)
    if not isinstance(value, Node) or not fixed or not (type(eps) is float or (eps is None and not centred)):
        return Obstacle(node.name, "unsupported-call", f"node `{node.name}` computes its own sizes or eps")
    owner = owner_of(next((ref.name for ref in refs if ref is not None), ""))
    training = trains(index, node, owner)
    weight, bias = refs
    sizes = tuple(sizes or ())
    return LayerNormCall(node, value, weight, bias, None, owner or node.name, training, sizes, eps, centred)


def _view(node: Node, value: Node, name: str, module: Any) -> LayerNormCall:
    weight, bias = module_tensor(module, name, "weight"), module_tensor(module, name, "bias")
    sizes, centred = tuple(module.normalized_shape), type(module) is nn.LayerNorm
    return LayerNormCall(node, value, weight, bias, module, name, module.training, sizes, module.eps, centred)
