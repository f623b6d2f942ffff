"""The reader of activations in every form of graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch._ops import OpOverload
from torch.fx import Node

from fxopt_rewrite.calls.any_form import operation_of
from fxopt_rewrite.calls.readers import named_arguments, read_module
from fxopt_rewrite.calls.records import ActivationCall, Obstacle
from fxopt_rewrite.index import GraphIndex
from fxopt_rewrite.ops import forms

# By operation: its settings after the input, in torch's order, with torch's defaults.
_SETTINGS: Mapping[str, dict[str, object]] = {
    **{name: {} for name in (*forms.ACTIVATIONS.values(), "relu6")},
    "clamp": {"min": None, "max": None},
    "clamp_min": {"min": None},
    "elu": {"alpha": 1.0},
    "gelu": {"approximate": "none"},
    "hardtanh": {"min_val": -1.0, "max_val": 1.0},
    "leaky_relu": {"negative_slope": 0.01},
    "softplus": {"beta": 1.0, "threshold": 20.0},
}
_MODULES: Mapping[type[nn.Module], str] = {
    **forms.ACTIVATIONS,
    nn.ELU: "elu",
    nn.GELU: "gelu",
    nn.Hardtanh: "hardtanh",
    nn.LeakyReLU: "leaky_relu",
    nn.ReLU6: "relu6",
    nn.Softplus: "softplus",
}


def read_activation(index: GraphIndex, node: Node) -> ActivationCall | Obstacle | None:
    """Read an activation: a module, function, method or ``aten`` operator, in place or not.

    These are read: relu, relu6, gelu, silu, mish, elu, selu, sigmoid, log_sigmoid, tanh, softplus, leaky_relu,
    hardtanh, hardswish, hardsigmoid, and clamp and clamp_min. Settings that the graph computes are an obstacle.

    >>> import torch
    >>> index = GraphIndex(torch.fx.symbolic_trace(nn.Sequential(nn.GELU("tanh"))))
    >>> call = read_activation(index, index.nodes[1])
    >>> call.name, call.settings, call.inplace
    ('gelu', {'approximate': 'tanh'}, False)
    """
    if node.op == "call_module":
        return read_module(index, node, tuple(_MODULES), _of_module)
    called = operation_of(node) or ""
    name = called.removesuffix("_")
    if name not in _SETTINGS:
        return None
    settings = dict(_SETTINGS[name])
    plain, names = _other_arguments(node, ("input", *settings))
    arguments = named_arguments(node, names, {"self": "input"})
    value, inplace = arguments.pop("input", None), arguments.pop("inplace", called.endswith("_"))
    settings |= {key: given for key, given in arguments.items() if key in settings}
    extra = [key for key, given in arguments.items() if key not in settings and given != plain.get(key)]
    computed = [key for key, given in {**settings, "inplace": inplace}.items() if isinstance(given, Node)]
    if not isinstance(value, Node) or extra or computed:
        found = ", ".join([*extra, *computed]) or "no value"
        return Obstacle(node.name, "unsupported-call", f"node `{node.name}` is given {found}")
    return ActivationCall(node, value, name, settings, bool(inplace))


def _other_arguments(node: Node, names: tuple[str, ...]) -> tuple[dict[str, object], tuple[str, ...]]:
    """Return what arguments that are no settings have to be, and the names of the arguments in order."""
    if not isinstance(node.target, OpOverload):
        return {"out": None}, (*names, "inplace")
    arguments: Any = node.target._schema.arguments
    return {each.name: each.default_value for each in arguments}, ("input", *(each.name for each in arguments[1:]))


def _of_module(node: Node, value: Node, name: str, module: Any) -> ActivationCall:
    operation = _MODULES[type(module)]
    settings = {key: getattr(module, key) for key in _SETTINGS[operation]}
    return ActivationCall(node, value, operation, settings, bool(getattr(module, "inplace", False)))
