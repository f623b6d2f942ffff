"""The reader of sums, differences, products and quotients of two operands in every form of graph."""

from __future__ import annotations

from torch._ops import OpOverload
from torch.fx import Node

from fxopt_rewrite.calls.any_form import operation_of
from fxopt_rewrite.calls.readers import named_arguments
from fxopt_rewrite.calls.records import ElementwiseCall, Obstacle
from fxopt_rewrite.ops import forms

_OPERATIONS = {"add", "sub", "mul", "div"}


def read_elementwise(node: Node) -> ElementwiseCall | Obstacle | None:
    """Read ``+``, ``-``, ``*`` or ``/`` of two operands: an operator, function, method or ``aten`` operator.

    In-place forms are read, too, and ``rsub`` with its operands exchanged. Arithmetic on sizes is read alike: ask
    `is_python_number`. A call with ``out=``, or an ``alpha`` that the graph computes, is an obstacle.

    >>> import torch
    >>> graph = torch.fx.Graph()
    >>> x = graph.placeholder("x")
    >>> call = read_elementwise(graph.call_method("sub_", (x, 3), {"alpha": 2}))
    >>> call.operation, call.left, call.right, call.alpha, call.inplace
    ('sub', x, 3, 2, True)
    """
    written = forms.INPLACE_OPERATORS.get(node.target) if node.op == "call_function" else None
    name = written or operation_of(node) or ""
    operation = "sub" if name == "rsub" else forms.SYNONYMS.get(name.rstrip("_"), name.rstrip("_"))
    if operation not in _OPERATIONS:
        return None
    scalar = isinstance(node.target, OpOverload) and node.target._overloadname == "Scalar"
    names = (*forms.OPERANDS, "alpha") if scalar else forms.OPERANDS
    arguments = named_arguments(node, names, forms.OPERAND_KEYWORDS)
    if not {"input", "other"} <= arguments.keys():
        return None
    left, right = arguments.pop("input"), arguments.pop("other")
    alpha, mode = arguments.pop("alpha", 1), arguments.pop("rounding_mode", None)
    extra = [key for key, value in arguments.items() if value is not None]
    if extra or type(alpha) not in (int, float) or not (mode is None or isinstance(mode, str)):
        found = ", ".join(extra) or f"alpha={alpha}, rounding_mode={mode}"
        return Obstacle(node.name, "unsupported-call", f"node `{node.name}` is given {found}")
    if name == "rsub":
        left, right = right, left
    inplace = written is not None or name.endswith("_")
    return ElementwiseCall(node, operation, left, right, alpha, mode, inplace)
