"""The reader of linear layers with integer weights, of whichever family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from fxopt_rewrite.calls.readers import module_tensor, read_module
from fxopt_rewrite.calls.records import LinearCall, Obstacle
from fxopt_rewrite.index import GraphIndex


def read_integer_linear(index: GraphIndex, node: Node) -> LinearCall | Obstacle | None:
    """Read a layer that computes ``x @ (scale * weight).T + bias``, the weight in int8, both of them buffers.

    Its class says so by an attribute ``integer_weight = True``, so that one family may make such layers, and another
    one may compute them in its own way. The call has a ``scale``.
    """
    module = index.module_of(node)
    if module is None or not getattr(type(module), "integer_weight", False):
        return None
    return read_module(index, node, (type(module),), _view)


def _view(node: Node, value: Node, name: str, module: Any) -> LinearCall | Obstacle:
    weight, scale = module_tensor(module, name, "weight"), module_tensor(module, name, "scale")
    if weight is None or scale is None:
        return Obstacle(name, "not-a-parameter", f"module `{name}` has no integers, or no scale")
    call = LinearCall(node, value, weight, module_tensor(module, name, "bias"), module, name, module.training)
    return replace(call, scale=scale)
