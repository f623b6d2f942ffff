"""The reader of embeddings in every form of graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from fxopt_rewrite.calls.readers import arguments_of, module_tensor, owner_of, read_module, tensor_ref, trains
from fxopt_rewrite.calls.records import EmbeddingCall, Obstacle
from fxopt_rewrite.index import GraphIndex

_FUNCTION = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_OPERATOR = ("weight", "input", "padding_idx", "scale_grad_by_freq", "sparse")
_TARGETS: dict[Any, tuple[str, ...]] = {
    F.embedding: _FUNCTION,
    torch.embedding: _OPERATOR,
    torch.ops.aten.embedding.default: _OPERATOR,
}


def read_embedding(index: GraphIndex, node: Node) -> EmbeddingCall | Obstacle | None:
    """Read an embedding: ``nn.Embedding``, or ``embedding`` of ``F``, ``torch`` or ``aten``.

    A ``max_norm`` is an obstacle: with it, each call writes the weight.

    >>> index = GraphIndex(torch.fx.symbolic_trace(nn.Sequential(nn.Embedding(9, 4, padding_idx=0))))
    >>> call = read_embedding(index, index.nodes[1])
    >>> call.label, tuple(call.weight.tensor.shape), call.padding_idx
    ('0', (9, 4), 0)
    """
    if node.op == "call_module":
        return read_module(index, node, (nn.Embedding,), _of_module)
    arguments = arguments_of(node, _TARGETS)
    if arguments is None:
        return None
    if "indices" in arguments:  # the operator's own name
        arguments["input"] = arguments.pop("indices")
    weight = tensor_ref(index, node, arguments.get("weight"), "weight", parameter=True)
    if isinstance(weight, Obstacle):
        return weight
    value, padding = arguments.get("input"), arguments.get("padding_idx")
    if weight is None or not isinstance(value, Node) or not (padding is None or type(padding) is int):
        return Obstacle(node.name, "unsupported-call", f"node `{node.name}` has no indices, or computes padding_idx")
    if arguments.get("max_norm") is not None:
        return _renormalised(node.name)
    owner = owner_of(weight.name)
    if padding is not None and padding < 0:  # counted from the end; the operator has -1 where there is none
        padding = None if _TARGETS[node.target] is _OPERATOR else padding + len(weight.tensor)
    return EmbeddingCall(node, value, weight, None, None, owner or node.name, trains(index, node, owner), padding)


def _of_module(node: Node, value: Node, name: str, module: Any) -> EmbeddingCall | Obstacle:
    if module.max_norm is not None:
        return _renormalised(name)
    weight = module_tensor(module, name, "weight")
    assert weight is not None
    return EmbeddingCall(node, value, weight, None, module, name, module.training, module.padding_idx)


def _renormalised(site: str) -> Obstacle:
    return Obstacle(site, "mutated", f"`{site}` has a max_norm, so that each call writes its weight")
