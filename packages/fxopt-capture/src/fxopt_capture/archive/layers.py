"""Build the layers whose calls a program consists of, from the calls: the program of an archive has no modules.

``aten.linear(x, fc.weight, fc.bias)``, traced in a ``torch.nn.Linear`` named ``fc`` -> ``nn.Linear(4, 3)`` with these
tensors

What `raise_layers` then compares is known to agree. Only calls that a layer of exactly such a class has made are taken,
by the stack of modules that ``torch.export`` keeps for each operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from fxopt_capture.graph.layers import LAYER_CALLS, LayerCall, call_arguments
from fxopt_capture.graph.shells import attribute, owner_of, running, value_of
from fxopt_core.graph import iter_nodes
from fxopt_rewrite.layers import bare_module

Arguments = Mapping[str, Any]


def build_layers(graph: Graph, root: nn.Module) -> None:
    """Put layers in the places of the plain modules in `root` whose tensors the graph's calls read."""
    for node, call in _calls(graph):
        name, cls = running(node), class_of(node, call)
        if not name or cls is None or not isinstance(node.target, torch._ops.OpOverload):
            continue
        arguments = call_arguments(node.target, node.args, node.kwargs)
        holder = attribute(root, name)
        if holder is None or type(holder) is nn.Module:
            values = {key: value_of(root, value) for key, value in arguments.items()}
            layer = _layer(cls, values, holder, arguments)
            if layer is not None:
                has_statistics = values.get("running_mean") is not None
                layer.training = bool(values["training"]) if has_statistics else root.training
                owner, local = owner_of(root, name)
                owner._modules[local] = layer


def _calls(graph: Graph) -> Iterator[tuple[Node, LayerCall]]:
    for node in iter_nodes(graph):
        call = LAYER_CALLS.get(node.target) if node.op == "call_function" else None
        if call is not None:
            yield node, call


def class_of(node: Node, call: LayerCall) -> type[nn.Module] | None:
    """Return the class of the module that has run a node, if it is among those that may have made the call."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    name = stack[-1][1] if stack else ""
    found = f"{name.__module__}.{name.__qualname__}" if isinstance(name, type) else str(name)
    return next((cls for cls in call.classes if f"{cls.__module__}.{cls.__qualname__}" == found), None)


def _layer(cls: type[nn.Module], arguments: Arguments, holder: nn.Module | None, given: Arguments) -> nn.Module | None:
    """Return a layer of a class with the tensors of `holder`, or None where they are not those of such a layer."""
    build = _BUILDERS.get(cls)
    if build is None:
        return None
    layer = build(cls, arguments, _channels(given))
    for kind in ("_parameters", "_buffers"):
        tensors: dict[str, Any] = {} if holder is None else vars(holder)[kind]
        held = {key: tensor for key, tensor in tensors.items() if tensor is not None}
        expected: dict[str, Any] = vars(layer)[kind]
        if held.keys() != {key for key, tensor in expected.items() if tensor is not None}:
            return None
        expected.update(held)
    return layer


def _channels(given: Arguments) -> int:
    """Return the number of channels of a call's input, by what is known of its value; 0 where nothing is."""
    node = given.get("input")
    value = node.meta.get("val") if isinstance(node, Node) else None
    known = isinstance(value, torch.Tensor) and value.dim() > 1 and isinstance(value.shape[1], int)
    return int(value.shape[1]) if known and isinstance(value, torch.Tensor) else 0


def _linear(cls: type[nn.Module], call: Arguments, channels: int) -> nn.Module:
    rows, columns = call["weight"].shape
    return bare_module(cls, columns, rows, bias=call["bias"] is not None)


def _expanded(sizes: Any, count: int) -> Any:
    """Return one size per dimension, where it is not a word such as ``same``."""
    return sizes if isinstance(sizes, str) else tuple(sizes) * (count // len(sizes))


def _convolution(cls: type[nn.Module], call: Arguments, channels: int) -> nn.Module:
    weight, groups = call["weight"], call["groups"]
    kernel = tuple(weight.shape[2:])
    settings = {key: _expanded(call[key], len(kernel)) for key in ("stride", "padding", "dilation")}
    first, second = weight.shape[:2]
    sizes = (second * groups, first)
    if "output_padding" in call:
        settings["output_padding"] = _expanded(call["output_padding"], len(kernel))
        sizes = (first, second * groups)
    return bare_module(cls, *sizes, kernel, groups=groups, bias=call["bias"] is not None, **settings)


def _batch_norm(cls: type[nn.Module], call: Arguments, channels: int) -> nn.Module:
    tensor = next((call[key] for key in ("weight", "running_mean") if call[key] is not None), None)
    size = channels if tensor is None else tensor.shape[0]
    tracked = call["running_mean"] is not None
    affine = call["weight"] is not None
    return bare_module(cls, size, call["eps"], call["momentum"], affine=affine, track_running_stats=tracked)


def _layer_norm(cls: type[nn.Module], call: Arguments, channels: int) -> nn.Module:
    affine, bias = call["weight"] is not None, call["bias"] is not None
    return bare_module(cls, list(call["normalized_shape"]), call["eps"], elementwise_affine=affine, bias=bias)


def _group_norm(cls: type[nn.Module], call: Arguments, channels: int) -> nn.Module:
    size = channels if call["weight"] is None else call["weight"].shape[0]
    return bare_module(cls, call["num_groups"], size, call["eps"], affine=call["weight"] is not None)


def _embedding(cls: type[nn.Module], call: Arguments, channels: int) -> nn.Module:
    rows, columns = call["weight"].shape
    padding = call["padding_idx"]
    layer = bare_module(cls, rows, columns, scale_grad_by_freq=call["scale_grad_by_freq"], sparse=call["sparse"])
    vars(layer)["padding_idx"] = None if padding == -1 else padding
    return layer


_BUILDERS: Mapping[type[nn.Module], Callable[[Any, Arguments, int], nn.Module]] = {
    nn.Linear: _linear,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _convolution),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm),
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    nn.Embedding: _embedding,
}
