"""``x @ weight.T + bias`` -> ``linear(x, weight, bias)``: linear layers that models write as products."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from fxopt_core import Refusal
from fxopt_rewrite import (
    Editor,
    ElementwiseCall,
    GraphIndex,
    Operation,
    ReversibleSitePass,
    TensorRef,
    read_elementwise,
    read_operation,
    tensor_facts,
)

_TURNS = frozenset({"t", "T", "numpy_T", "mT", "adjoint", "H", "mH", "matrix_H", "transpose", "permute"})
_PRODUCTS = {"matmul": ("input", "other"), "mm": ("input", "mat2"), "addmm": ("mat1", "mat2")}
_EQUATION = re.compile(r"((?:\.\.\.)?[A-Za-z]*)([A-Za-z]),([A-Za-z])([A-Za-z])->((?:\.\.\.)?[A-Za-z]*)([A-Za-z])")


@dataclass(frozen=True, eq=False)
class WrittenLinear:
    """A linear layer of several calls.

    Attributes:
        nodes: the product, and the sum with the bias if there is one.
        input: what the layer is called with.
        weight: the node that reads the weight.
        bias: the node that reads the bias, or None.
        turn: the node that transposes the weight, or None.
        function: ``F.linear``, or ``torch.matmul`` for a weight of shape (in, out).
    """

    nodes: tuple[Node, ...]
    input: Node
    weight: Node
    bias: Node | None
    turn: Node | None
    function: Callable[..., Tensor] = F.linear

    @property
    def label(self) -> str:
        """The name of the weight."""
        return str(self.weight.target)


class FuseProducts(ReversibleSitePass[WrittenLinear]):
    """``x @ weight.T + bias`` -> ``linear(x, weight, bias)``: for the passes that read linear layers.

    Products by ``@``, ``matmul``, ``mm``, ``addmm``, ``inner`` and ``einsum`` of two operands are found, with weights
    that are parameters or buffers of two dimensions, turned by ``.T``, ``t``, ``mT``, ``adjoint``, ``transpose``,
    ``swapaxes`` or ``permute``. A bias of one dimension that is added to the product, or to ``linear`` without one,
    goes with it. Results are the same except for rounding.

    A bias that is added where something else reads the product, too, stays. Refused: values that are written in place
    between product and sum, and a bias or sum of another dtype than the product, as under autocast.

    Source:
        torch.nn.functional.linear, https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.linear.html

    Cost:
        One call instead of two or three.

    >>> from fxopt_rewrite import infer_shapes
    >>> class Layer(torch.nn.Linear):
    ...     def forward(self, x):
    ...         return x @ self.weight.T + self.bias
    >>> graph = torch.fx.symbolic_trace(Layer(4, 3))
    >>> fused = FuseProducts()(infer_shapes(graph, torch.ones(2, 4)))
    >>> [node.name for node in fused.graph.nodes]
    ['x', 'weight', 'bias', 'linear', 'output']
    """

    def match(self, index: GraphIndex) -> Iterator[WrittenLinear]:
        """Yield the linear layers that are written as products."""
        for node in index.nodes:
            site = _product(index, node)
            if site is not None and site.function is F.linear:
                site = _with_bias(index, site)
            if site is not None and not (site.nodes == (node,) and _is_linear(index, node)):
                yield site

    def check(self, site: WrittenLinear, index: GraphIndex) -> Refusal | None:
        """Refuse values that are written between the product and the sum, and sums of another dtype."""
        first, last = site.nodes[0], site.nodes[-1]
        for value in (site.input, site.weight, *([] if site.bias is None else [site.bias])):
            if first is not last and index.effects.written_between(value, first, last):
                message = f"`{value.name}` is written in place, or a mode changes, before node `{last.name}`"
                return index.refuse(site.label, "mutated", message, *site.nodes)
        bias = None if site.bias is None or first is last else index.tensor_of(site.bias)
        for node in () if bias is None else site.nodes:
            facts = tensor_facts(node)
            if facts is None:
                message = f"the dtype of `{node.name}` is unknown; call infer_shapes first"
                return index.refuse(site.label, "shape-unknown", message, *site.nodes)
            if bias is not None and facts.dtype != bias.dtype:
                message = f"`{node.name}` is {facts.dtype}, and the bias `{site.bias}` {bias.dtype}; expected one dtype"
                return index.refuse(site.label, "dtype-mismatch", message, *site.nodes)
        return None

    def rewrite(self, site: WrittenLinear, edit: Editor) -> None:
        """Insert torch's function, and take out the calls."""
        *between, last = site.nodes
        arguments = [site.input, site.weight] if site.bias is None else [site.input, site.weight, site.bias]
        edit.replace(last, edit.call_function(site.function, *arguments, before=last, like=site.nodes[::-1]))
        for node in between:
            edit.erase(node)
        if site.turn is not None and not site.turn.users:
            edit.erase(site.turn)


def _is_linear(index: GraphIndex, node: Node) -> bool:
    call = read_operation(index, node)
    return isinstance(call, Operation) and call.name == "linear"


def _matrix(index: GraphIndex, node: object) -> Tensor | None:
    """Return the tensor of two dimensions that a node reads from the module, or None."""
    tensor = index.tensor_of(node) if isinstance(node, Node) else None
    return tensor if tensor is not None and tensor.dim() == 2 else None


def _turned(index: GraphIndex, node: object) -> tuple[Node, Node] | None:
    """Return what reads a matrix, and what transposes it, for a node that is one transposed."""
    call = read_operation(index, node) if isinstance(node, Node) else None
    if not isinstance(call, Operation) or not isinstance(node, Node) or call.name not in _TURNS:
        return None
    source = call.arguments.get("input")
    matrix = _matrix(index, source)
    if not isinstance(source, Node) or matrix is None or matrix.is_complex():
        return None
    if call.name == "transpose":
        dims = [call.arguments.get("dim0"), call.arguments.get("dim1")]
    else:
        dims = list(call.arguments.get("dims", (1, 0)))
    first, last = (dim % 2 if isinstance(dim, int) else None for dim in dims)
    turns = (first, last) == (1, 0) or (call.name == "transpose" and (first, last) == (0, 1))
    return (source, node) if turns else None


def _product(index: GraphIndex, node: Node) -> WrittenLinear | None:
    """Return a product with a matrix of the module, other than one that linear layers are read from already."""
    call = read_operation(index, node)
    if not isinstance(call, Operation) or call.module is not None:
        return None
    arguments = call.arguments
    if call.name in _PRODUCTS:
        value, weight = (arguments.get(name) for name in _PRODUCTS[call.name])
        turned = _turned(index, weight)
        if turned is None or not isinstance(value, Node):
            return None
        bias = arguments["input"] if call.name == "addmm" else None
        bias = bias.node if isinstance(bias, TensorRef) else bias
        is_plain = arguments.get("alpha", 1) == arguments.get("beta", 1) == 1
        if call.name == "addmm" and not (is_plain and _is_bias(index, bias, turned[0])):
            return None
        return WrittenLinear((node,), value, turned[0], bias, turned[1])
    if call.name == "einsum":
        return _einsum(index, node, call)
    names = {"inner": "other", "linear": "weight"}
    value, weight = arguments.get("input"), arguments.get(names.get(call.name, ""))
    if isinstance(weight, TensorRef):
        weight = weight.node
    if arguments.get("bias") is None and _matrix(index, weight) is not None and isinstance(value, Node):
        assert isinstance(weight, Node)
        return WrittenLinear((node,), value, weight, None, None)
    return None


def _einsum(index: GraphIndex, node: Node, call: Operation) -> WrittenLinear | None:
    arguments = call.arguments
    given = [arguments[name] for name in ("equation", "tensors", "#0", "#1", "#2") if name in arguments]
    equation, operands = given[0], given[1:]
    if isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    found = _EQUATION.fullmatch(equation.replace(" ", "")) if isinstance(equation, str) else None
    if found is None or len(operands) != 2 or _matrix(index, operands[1]) is None:
        return None
    value, weight = operands
    rows, inner, one, other, kept, outer = found.groups()
    letters = [*rows.removeprefix("..."), inner, outer]
    if rows != kept or len({*letters}) != len(letters) or {one, other} != {inner, outer}:
        return None
    if not isinstance(value, Node) or not isinstance(weight, Node):
        return None
    if other == inner:
        return WrittenLinear((node,), value, weight, None, None)
    return WrittenLinear((node,), value, weight, None, None, torch.matmul)


def _is_bias(index: GraphIndex, node: Any, weight: Node) -> bool:
    bias, matrix = (index.tensor_of(each) if isinstance(each, Node) else None for each in (node, weight))
    return bias is not None and matrix is not None and tuple(bias.shape) == (matrix.shape[0],)


def _with_bias(index: GraphIndex, site: WrittenLinear) -> WrittenLinear:
    """Return a site with the bias that is added to it, if nothing else reads the product."""
    (product,) = site.nodes
    user = next(iter(product.users), None)
    call = None if user is None or len(product.users) > 1 or site.bias is not None else read_elementwise(user)
    if user is None or not isinstance(call, ElementwiseCall) or call.inplace:
        return site
    bias = call.right if call.left is product else call.left
    is_sum = call.operation == "add" and call.alpha == 1
    if not is_sum or not isinstance(bias, Node) or not _is_bias(index, bias, site.weight):
        return site
    return replace(site, nodes=(product, user), bias=bias)
