"""``x @ weight.T + bias`` -> ``linear(x, weight, bias)``: linear layers that models write as products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from fxopt_rewrite import GraphIndex, Match, Pattern, PatternPass, TensorRef, read_operation
from fxopt_simplify.attention.reader import is_last_transpose

#: Transposes of a matrix; conjugates are equal for real weights, and others are not taken.
_TURNS = frozenset({"t", "T", "numpy_T", "adjoint", "H", "mH", "matrix_H"})


def _matrix(index: GraphIndex, node: Node) -> TensorRef | None:
    """Read a tensor of two dimensions from the model."""
    tensor = index.tensor_of(node)
    return None if tensor is None or tensor.dim() != 2 else TensorRef(str(node.target), tensor, node)


def _turned(index: GraphIndex, node: Node) -> TensorRef | None:
    """Read a transposed matrix."""
    call = read_operation(index, node)
    if call is None or call.input is None or not (call.name in _TURNS or is_last_transpose(call, 2)):
        return None
    matrix = _matrix(index, call.input)
    return None if matrix is None or matrix.tensor.is_complex() else matrix


_Formula: TypeAlias = Callable[..., Any]
_PRODUCTS: tuple[tuple[_Formula, Any], ...] = (
    (lambda x, w: x @ w, Annotated[Tensor, _turned]),
    (lambda x, w: torch.mm(x, w), Annotated[Tensor, _turned]),
    (lambda x, w: torch.inner(x, w), Annotated[Tensor, _matrix]),
)


class FuseProducts(PatternPass):
    """``x @ weight.T + bias`` -> ``linear(x, weight, bias)``: for the passes that read linear layers.

    Products by ``@``, ``matmul``, ``mm``, ``addmm`` and ``inner`` are found, with weights that are parameters or
    buffers of two dimensions, turned by ``.T``, ``t``, ``mT``, ``adjoint``, ``transpose``, ``swapaxes`` or
    ``permute``. A bias of one dimension that is added to the product, or to ``linear`` without one, is included.
    Results are the same except for rounding.

    A bias is not included if something else also reads the product. Refused: values that are written in place
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

    dtypes = ()

    def patterns(self) -> Iterator[Pattern]:
        """Yield the ways to write a product, with a bias and without."""
        kinds = {"w": Annotated[Tensor, _matrix], "b": nn.Parameter}
        for product, weight in _PRODUCTS:
            yield Pattern(lambda x, w, b, product=product: product(x, w) + b, F.linear, kinds={**kinds, "w": weight})
            yield Pattern(product, F.linear, kinds={**kinds, "w": weight})
        turned = {**kinds, "w": Annotated[Tensor, _turned]}
        yield Pattern(lambda x, w, b: torch.addmm(b, x, w), F.linear, kinds=turned)
        yield Pattern(lambda x, w, b: F.linear(x, w) + b, F.linear, kinds=kinds)

    def accepts(self, match: Match, index: GraphIndex) -> bool:
        """Return whether the bias, if there is one, is that of a linear layer."""
        weight, bias = match.values["w"], match.values.get("b")
        return bias is None or tuple(bias.tensor.shape) == (weight.tensor.shape[0],)
