"""Reading linear layers: ``nn.Linear``, ``F.linear``, and those whose weight is stored as (in, out).

The latter are ``Conv1D`` of GPT-2, which is ``addmm(bias, rows, weight)`` where a tracer or an export goes through it,
and products with a 2-D parameter on the right: ``x @ weight``, ``torch.matmul``, ``torch.mm`` and their operators.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Node

from fxopt_core.call_forms import (
    ADDMM,
    ADDMM_KEYWORDS,
    LINEAR_TARGETS,
    PRODUCT_KEYWORDS,
    TRANSPOSED_METHODS,
    TRANSPOSED_TARGETS,
)
from fxopt_core.calls import LinearCall, Obstacle
from fxopt_core.index import GraphIndex
from fxopt_core.module_state import conv1d_class
from fxopt_core.reading import (
    arguments_of,
    module_tensor,
    named_arguments,
    owner_of,
    read_module,
    trains,
    weight_and_bias,
)


def read_linear(index: GraphIndex, node: Node, *, transposed: bool = False) -> LinearCall | Obstacle | None:
    """Read a linear layer: ``nn.Linear``, ``F.linear`` or ``aten.linear``.

    Args:
        index: facts about the graph module.
        node: the node.
        transposed: whether the reader takes weights of shape (in_features, out_features) too, as in ``Conv1D`` of
            GPT-2, ``torch.addmm`` and ``x @ weight``. Elsewhere these are obstacles, with reason ``transposed-weight``.
    """
    call = _read(index, node)
    if isinstance(call, LinearCall) and call.transposed and not transposed:
        shape, form = tuple(call.weight.tensor.shape), "(in, out), and this pass reads (out, in)"
        return Obstacle(call.label, "transposed-weight", f"`{call.weight.name}` of shape {shape} is stored as {form}")
    return call


def input_of(node: Node) -> Node | None:
    """Return the value that a layer's call works on: its first argument, or the one called ``input``.

    Of ``addmm``, whose first argument is the bias, it is the second.
    """
    if _transposed_names(node) is ADDMM:
        value = node.args[1] if len(node.args) > 1 else node.kwargs.get("mat1")
    else:
        names = (name for name in ("input", "self", "x") if name in node.kwargs)
        value = node.args[0] if node.args else node.kwargs.get(next(names, "input"))
    return value if isinstance(value, Node) else None


def _read(index: GraphIndex, node: Node) -> LinearCall | Obstacle | None:
    if node.op == "call_module":
        conv1d = conv1d_class()
        return read_module(index, node, (nn.Linear,) if conv1d is None else (nn.Linear, conv1d), _module_view)
    names = _transposed_names(node)
    if names is not None:
        return _read_product(index, node, names)
    arguments = arguments_of(node, LINEAR_TARGETS)
    if arguments is None:
        return None
    found = weight_and_bias(index, node, arguments)
    if isinstance(found, Obstacle):
        return found
    owner = owner_of(found[1].name)
    return _fitting(LinearCall(node, *found, None, owner, trains(index, node, owner)))


def _transposed_names(node: Node) -> tuple[str, ...] | None:
    """Return the positional arguments of an operation whose weight is (in, out); None for other operations."""
    if node.op == "call_method":
        return TRANSPOSED_METHODS.get(str(node.target))
    return TRANSPOSED_TARGETS.get(node.target) if node.op == "call_function" else None


def _read_product(index: GraphIndex, node: Node, names: tuple[str, ...]) -> LinearCall | Obstacle | None:
    """Read ``addmm(bias, input, weight)`` or ``input @ weight``; a product of computed values is no layer."""
    arguments = named_arguments(node, names, ADDMM_KEYWORDS if names is ADDMM else PRODUCT_KEYWORDS)
    weight = arguments.get("weight")
    tensor = index.tensor_of(weight) if isinstance(weight, Node) else None
    if names is not ADDMM and (tensor is None or tensor.dim() != 2):
        return None
    found = weight_and_bias(index, node, arguments)
    if isinstance(found, Obstacle):
        return found
    extra = [name for name, value in arguments.items() if name not in ("input", "weight", "bias") and value != 1]
    if extra:
        message = f"node `{node.name}` is given {', '.join(f'{name}={arguments[name]}' for name in extra)}"
        return Obstacle(found[1].name, "unsupported-call", message)
    owner = owner_of(found[1].name)
    return _fitting(LinearCall(node, *found, None, owner, trains(index, node, owner), transposed=True))


def _module_view(node: Node, value: Node, name: str, module: Any) -> LinearCall | Obstacle:
    weight, bias = module_tensor(module, name, "weight"), module_tensor(module, name, "bias")
    if weight is None:
        return Obstacle(name, "not-a-parameter", f"module `{name}` has no weight")
    transposed = type(module) is not nn.Linear
    if transposed and (bias is None or module.nf != weight.tensor.shape[-1]):
        return Obstacle(name, "unsupported-call", f"module `{name}` lacks a bias, or its nf is not that of its weight")
    return _fitting(LinearCall(node, value, weight, bias, module, name, module.training, transposed=transposed))


def _fitting(call: LinearCall) -> LinearCall | Obstacle:
    """Return the call, or what is wrong where its tensors are not those of a layer: ``F.linear`` takes more shapes."""
    weight, bias = call.weight.tensor, call.bias
    if weight.dim() != 2:
        message = f"`{call.weight.name}` has shape {tuple(weight.shape)}, and a layer's weight has two dimensions"
        return Obstacle(call.label, "unsupported-call", message)
    if bias is not None and tuple(bias.tensor.shape) != (call.out_features,):
        found, expected = tuple(bias.tensor.shape), (call.out_features,)
        message = f"`{bias.name}` has shape {found}, expected {expected}; it is broadcast over the result"
        return Obstacle(call.label, "unsupported-call", message)
    return call
