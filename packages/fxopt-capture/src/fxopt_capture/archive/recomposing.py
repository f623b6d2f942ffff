"""Put the operators of layers together again that ``ExportedProgram.run_decompositions`` has taken apart.

``view(addmm(fc.bias, view(x, [2 * s, 4]), permute(fc.weight, [1, 0])), [2, s, 3])``, traced in a ``torch.nn.Linear``
named ``fc`` -> ``linear(x, fc.weight, fc.bias)``

Layers are found by the operators that they call, and older versions of torch export decomposed programs anyway. Only
operators that a layer of exactly such a class has run are taken, by the stack of modules that ``torch.export`` keeps,
and only where what they compute is that of the layer. Running statistics that training updates are left as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from fxopt_capture.archive.layers import class_of
from fxopt_capture.export.conditions import size_expression
from fxopt_capture.graph.layers import LAYER_CALLS, call_arguments
from fxopt_core.graph import iter_nodes

aten = torch.ops.aten
Call = tuple[Node, torch._ops.OpOverload, tuple[Any, ...]]
"""The node whose value the operator of a layer computes, the operator, and its arguments."""

_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})
_ROWS = _VIEWS | {aten.clone.default}
_EXPANDED = _ROWS | {aten.expand.default}
_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
_TRANSPOSED = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)


def recompose(graph: Graph) -> None:
    """Replace what layers were decomposed to by the operators that they call.

    What is left over has no users; whoever tidies the graph drops it.
    """
    for node in iter_nodes(graph):
        read = _READERS.get(node.target) if node.op == "call_function" else None
        found = None if read is None else read(node)
        if found is not None and class_of(node, LAYER_CALLS[found[1]]) is not None:
            _replace(graph, *found)


def _replace(graph: Graph, result: Node, target: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
    with graph.inserting_before(result):
        new = graph.create_node("call_function", target, args)
    new.meta = dict(result.meta)
    result.replace_all_uses_with(new)


def _arguments(node: Node) -> dict[str, Any]:
    target = node.target
    return call_arguments(target, node.args, node.kwargs) if isinstance(target, torch._ops.OpOverload) else {}


def _shape(node: object) -> list[object] | None:
    """Return the sizes of a value, those that vary as expressions, or None where they are not known."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    return [size if (expression := size_expression(size)) is None else expression for size in value.shape]


def _convolution(node: Node) -> Call | None:
    call, shape = _arguments(node), _shape(node)
    dimensions = 0 if shape is None else len(shape) - 2
    if not 1 <= dimensions <= 3:
        return None
    start = (call["input"], call["weight"], call["bias"], call["stride"], call["padding"])
    if call["transposed"]:
        return node, _TRANSPOSED[dimensions - 1], (*start, call["output_padding"], call["groups"], call["dilation"])
    return node, _CONVOLUTIONS[dimensions - 1], (*start, call["dilation"], call["groups"])


def _first_result(node: Node) -> Node | None:
    """Return the first of the results of a normalization where the others, the statistics, are not used."""
    used = [user for user in node.users if user.users]
    is_first = len(used) == 1 and used[0].target is operator.getitem and used[0].args[1] == 0
    return used[0] if is_first else None


def _batch_norm(node: Node) -> Call | None:
    result, call = _first_result(node), _arguments(node)
    if result is None:
        return None
    tensors = (call["input"], call["weight"], call["bias"], call["running_mean"], call["running_var"])
    return result, aten.batch_norm.default, (*tensors, False, call["momentum"], call["eps"], True)


_NORMS: Mapping[object, tuple[torch._ops.OpOverload, tuple[str, ...]]] = {
    aten.native_layer_norm.default: (aten.layer_norm.default, ("input", "normalized_shape", "weight", "bias", "eps")),
    aten.native_group_norm.default: (aten.group_norm.default, ("input", "group", "weight", "bias", "eps")),
}


def _norm(node: Node) -> Call | None:
    result, call = _first_result(node), _arguments(node)
    target, names = _NORMS[node.target]
    return None if result is None else (result, target, tuple(call[name] for name in names))


def _product(node: Node) -> Call | None:
    """Read ``rows @ weight.T``; with the views around it, where they only flatten what a linear layer takes."""
    call = _arguments(node)
    if call.get("beta", 1) != 1 or call.get("alpha", 1) != 1:
        return None
    rows, second = (call["mat1"], call["mat2"]) if "mat1" in call else (call["self"], call["mat2"])
    bias = call["self"] if "mat1" in call else None
    weight = _transposed_from(second)
    if weight is None or (bias is not None and len(_shape(bias) or ()) != 1):
        return None
    x, result = _unflattened(rows, node) or (rows, node)
    return result, aten.linear.default, (x, weight, bias)


def _transposed_from(node: object) -> Node | None:
    """Return the attribute that a node transposes."""
    if not isinstance(node, Node) or node.kwargs or not node.args or not _swaps(node.target, node.args[1:]):
        return None
    source = node.args[0]
    is_matrix = isinstance(source, Node) and source.op == "get_attr" and len(_shape(source) or ()) == 2
    return source if is_matrix and isinstance(source, Node) else None


def _swaps(target: object, order: tuple[Any, ...]) -> bool:
    """Whether this operator swaps the two dimensions of a matrix."""
    if target is aten.permute.default:
        return [list(dims) for dims in order] == [[1, 0]]
    if target is aten.transpose.int:
        return sorted(dim % 2 if isinstance(dim, int) else dim for dim in order) == [0, 1]
    return target is aten.t.default


def _unflattened(rows: Node, product: Node) -> tuple[Node, Node] | None:
    """Return what was viewed as rows, and the view that undoes this on the product, its only reader."""
    result = next(iter(product.users), product)
    if rows.target not in _VIEWS or result.target not in _VIEWS or len(product.users) != 1:
        return None
    x = _source(rows, product, _ROWS)
    taken, given, flat, made = _shape(x), _shape(result), _shape(rows), _shape(product)
    if taken is None or given is None or flat is None or made is None:
        return None
    fits = taken[:-1] == given[:-1] and taken[-1:] == flat[-1:] and given[-1:] == made[-1:]
    return (x, result) if fits else None


def _source(node: Node, product: Node, passed: Collection[object]) -> Node:
    """Return what a node was made of by these operators, within the layer that has run `product`."""
    while node.target in passed and isinstance(node.args[0], Node) and _layer_of(node) == _layer_of(product):
        node = node.args[0]
    return node


def _batched(node: Node) -> Call | None:
    """Read ``x @ weight.T + bias`` where the input is not contiguous: one product per batch, all with one weight."""
    call, result = _arguments(node), next(iter(node.users), node)
    x, second = _source(call["self"], node, _EXPANDED), _source(call["mat2"], node, _EXPANDED)
    weight = _transposed_from(second)
    if weight is None or len(node.users) != 1 or result.target not in _VIEWS:
        return None
    taken, given = _shape(x) or [], _shape(result) or []
    left, right, matrix = _shape(call["self"]) or [], _shape(call["mat2"]) or [], _shape(second) or []
    if not taken or taken != [*given[:-1], *matrix[:1]] or right[1:] != matrix or left[2:] != taken[-1:]:
        return None
    total = next(iter(result.users), result)
    bias = total.args[1] if total.target is aten.add.Tensor and not total.kwargs and len(result.users) == 1 else None
    is_bias = isinstance(bias, Node) and bias.op == "get_attr" and _shape(bias) == matrix[1:]
    if is_bias and total.args[0] is result and _layer_of(total) == _layer_of(node):
        return total, aten.linear.default, (x, weight, bias)
    return result, aten.linear.default, (x, weight, None)


def _layer_of(node: Node) -> object:
    return next(reversed((node.meta.get("nn_module_stack") or {}).values()), None)


_READERS: Mapping[object, Callable[[Node], Call | None]] = {
    aten.convolution.default: _convolution,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten.native_layer_norm.default: _norm,
    aten.native_group_norm.default: _norm,
    aten.addmm.default: _product,
    aten.mm.default: _product,
    aten.bmm.default: _batched,
}
