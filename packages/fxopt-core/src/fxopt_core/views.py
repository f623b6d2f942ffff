"""Typed views of calls: one way to read linear, convolution, batch-norm and division calls on every form of graph.

A reader returns a view, or an `Obstacle` where the node is such a call but not one that may be rewritten, or None where
it is something else.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Node

from fxopt_core.call_forms import (
    BATCH_NORM_TARGETS,
    CONV_TARGETS,
    CONV_TRANSPOSE,
    DECOMPOSED_BATCH_NORMS,
    METHOD_PRODUCTS,
    NORMS,
    PRODUCTS,
)
from fxopt_core.calls import (
    PLAIN,
    TRANSPOSED,
    BatchNormCall,
    ConvolutionCall,
    LinearCall,
    Obstacle,
    ParameterisedCall,
    TensorRef,
    TrueDivision,
)
from fxopt_core.index import GraphIndex
from fxopt_core.linear_views import input_of, read_linear
from fxopt_core.reading import (
    arguments_of,
    module_tensor,
    named_arguments,
    owner_of,
    read_module,
    tensor_ref,
    trains,
    weight_and_bias,
)

__all__ = [
    "BatchNormCall",
    "ConvolutionCall",
    "LinearCall",
    "Obstacle",
    "ParameterisedCall",
    "TensorRef",
    "TrueDivision",
    "input_of",
    "read_batch_norm",
    "read_convolution",
    "read_linear",
    "read_true_division",
]


def read_convolution(index: GraphIndex, node: Node) -> ConvolutionCall | Obstacle | None:
    """Read a convolution over 1 to 3 dimensions, plain or transposed, of any form."""
    if node.op == "call_module":
        return read_module(index, node, (*PLAIN, *TRANSPOSED), _convolution_view)
    arguments = arguments_of(node, CONV_TARGETS)
    if arguments is None:
        return None
    found = weight_and_bias(index, node, arguments)
    if isinstance(found, Obstacle):
        return found
    dims = found[1].tensor.dim() - 2
    settings = [_numbers(arguments.get(name, default), dims) for name, default in _CONV_DEFAULTS]
    groups = arguments.get("groups", 1)
    if dims not in (1, 2, 3) or any(setting is None for setting in settings) or not isinstance(groups, int):
        return Obstacle(found[1].name, "unsupported-call", f"node `{node.name}` computes its own stride or padding")
    stride, padding, dilation, output_padding = (setting for setting in settings if setting is not None)
    if isinstance(stride, str) or isinstance(dilation, str) or isinstance(output_padding, str):
        return Obstacle(found[1].name, "unsupported-call", f"node `{node.name}` has a stride that is text")
    transposed = bool(arguments.get("transposed", _is_transposed(node)))
    owner = owner_of(found[1].name)
    return ConvolutionCall(
        node, *found, None, owner, trains(index, node, owner),
        stride, padding, dilation, groups, transposed, output_padding, "zeros",
    )  # fmt: skip


_LAZY_NORMS = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)  # no subclasses of what they become


def read_batch_norm(index: GraphIndex, node: Node) -> BatchNormCall | Obstacle | None:
    """Read a batch norm: ``nn.BatchNorm1d`` to ``3d``, or ``batch_norm`` of ``F``, ``torch`` or ``aten``."""
    if node.op == "call_module":
        return read_module(index, node, (*NORMS, *_LAZY_NORMS), _batch_norm_view)
    if node.op == "call_function" and node.target in DECOMPOSED_BATCH_NORMS:
        found = f"node `{node.name}` is a batch norm that was decomposed, into `{node.target}`"
        return Obstacle(node.name, "decomposed", found)
    arguments = arguments_of(node, BATCH_NORM_TARGETS)
    if arguments is None:
        return None
    refs: list[TensorRef | None] = []
    for name in ("weight", "bias", "running_mean", "running_var"):
        what = name.replace("_", " ")
        ref = tensor_ref(index, node, arguments.get(name), what, parameter=name in ("weight", "bias"))
        if isinstance(ref, Obstacle):
            return ref
        refs.append(ref)
    eps, training, value = arguments.get("eps", 1e-5), arguments.get("training", False), arguments.get("input")
    if not isinstance(eps, float | int) or not isinstance(training, bool) or not isinstance(value, Node):
        return Obstacle(node.name, "unsupported-call", f"node `{node.name}` computes its own eps or training flag")
    weight, bias, mean, var = refs
    owner = owner_of(next((ref.name for ref in refs if ref is not None), ""))
    counter = index.modules[owner]._buffers.get("num_batches_tracked") if owner in index.modules else None
    tracked = TensorRef(f"{owner}.num_batches_tracked".lstrip("."), counter, None) if counter is not None else None
    return BatchNormCall(
        node, value, weight, bias, None, owner or node.name, training, mean, var, tracked, float(eps), ()
    )


def read_true_division(index: GraphIndex, node: Node) -> TrueDivision | Obstacle | None:
    """Read a division: ``/``, ``torch.div``, ``x.div``, their in-place forms, or ``aten.div``."""
    if node.op == "call_method":
        product: Any = METHOD_PRODUCTS.get(str(node.target))
    else:
        product = PRODUCTS.get(node.target) if node.op == "call_function" else None
    if product is None:
        return None
    arguments = named_arguments(node, ("input", "other"), {"self": "input"})
    if arguments.get("rounding_mode") is not None:
        constant = not isinstance(arguments.get("other"), Node)  # what divides by a tensor is nobody's candidate
        return Obstacle(node.name, "rounding-mode", f"node `{node.name}` rounds its quotient") if constant else None
    extra = set(arguments) - {"input", "other", "rounding_mode"}
    value = arguments.get("input")
    if not isinstance(value, Node) or "other" not in arguments:
        return None
    if extra:
        return Obstacle(node.name, "unsupported-call", f"node `{node.name}` is given {', '.join(sorted(extra))}")
    return TrueDivision(node, value, arguments["other"], product)


_CONV_DEFAULTS: tuple[tuple[str, Any], ...] = (("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0))


def _numbers(value: Any, dims: int) -> tuple[int, ...] | str | None:
    """Return one number a dimension, or a padding's name; None where the graph computes them."""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return (value,) * dims
    if not isinstance(value, list | tuple) or not all(isinstance(item, int) for item in value):
        return None
    return tuple(value) * dims if len(value) == 1 else tuple(value)


def _is_transposed(node: Node) -> bool:
    return CONV_TARGETS[node.target] is CONV_TRANSPOSE


def _convolution_view(node: Node, value: Node, name: str, module: Any) -> ConvolutionCall | Obstacle:
    weight = module_tensor(module, name, "weight")
    if weight is None:
        return Obstacle(name, "not-a-parameter", f"module `{name}` has no weight")
    return ConvolutionCall(
        node, value, weight, module_tensor(module, name, "bias"), module, name, module.training,
        tuple(module.stride), module.padding if isinstance(module.padding, str) else tuple(module.padding),
        tuple(module.dilation), module.groups, module.transposed, tuple(module.output_padding), module.padding_mode,
    )  # fmt: skip


def _batch_norm_view(node: Node, value: Node, name: str, module: Any) -> BatchNormCall:
    weight, bias, mean, var, counter = (
        module_tensor(module, name, key)
        for key in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    )
    return BatchNormCall(
        node, value, weight, bias, module, name, module.training, mean, var, counter, module.eps, NORMS[type(module)]
    )
