"""Typed views of calls: one way to read linear, convolution, batch-norm and division calls on every form of graph.

A reader returns a view, or an `Obstacle` where the node is such a call but not one that may be rewritten, or None where
it is something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn
from torch._ops import OpOverload
from torch.fx import Node

from fxopt_core.call_forms import (
    BATCH_NORM_TARGETS,
    CONV_TARGETS,
    CONV_TRANSPOSE,
    LINEAR_TARGETS,
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
from fxopt_core.module_state import module_problem, tensor_problem, tensor_reason

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


def read_linear(index: GraphIndex, node: Node) -> LinearCall | Obstacle | None:
    """Read a linear layer: ``nn.Linear``, ``F.linear`` or ``aten.linear``."""
    if node.op == "call_module":
        return _read_module(index, node, (nn.Linear,), _linear_view)
    arguments = _arguments(node, LINEAR_TARGETS)
    if arguments is None:
        return None
    found = _parameters(index, node, arguments)
    if isinstance(found, Obstacle):
        return found
    owner = _owner(found[1].name)
    return LinearCall(node, *found, None, owner, _training(index, node, owner))


def read_convolution(index: GraphIndex, node: Node) -> ConvolutionCall | Obstacle | None:
    """Read a convolution over 1 to 3 dimensions, plain or transposed, of any form."""
    if node.op == "call_module":
        return _read_module(index, node, (*PLAIN, *TRANSPOSED), _convolution_view)
    arguments = _arguments(node, CONV_TARGETS)
    if arguments is None:
        return None
    found = _parameters(index, node, arguments)
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
    owner = _owner(found[1].name)
    return ConvolutionCall(
        node, *found, None, owner, _training(index, node, owner),
        stride, padding, dilation, groups, transposed, output_padding, "zeros",
    )  # fmt: skip


def read_batch_norm(index: GraphIndex, node: Node) -> BatchNormCall | Obstacle | None:
    """Read a batch norm: ``nn.BatchNorm1d`` to ``3d``, or ``batch_norm`` of ``F``, ``torch`` or ``aten``."""
    if node.op == "call_module":
        return _read_module(index, node, tuple(NORMS), _batch_norm_view)
    arguments = _arguments(node, BATCH_NORM_TARGETS)
    if arguments is None:
        return None
    refs: list[TensorRef | None] = []
    for name in ("weight", "bias", "running_mean", "running_var"):
        ref = _tensor(index, node, arguments.get(name), parameter=name in ("weight", "bias"))
        if isinstance(ref, Obstacle):
            return ref
        refs.append(ref)
    eps, training, value = arguments.get("eps", 1e-5), arguments.get("training", False), arguments.get("input")
    if not isinstance(eps, float | int) or not isinstance(training, bool) or not isinstance(value, Node):
        return Obstacle(node.name, "unsupported-call", f"node `{node.name}` computes its own eps or training flag")
    weight, bias, mean, var = refs
    owner = _owner(next((ref.name for ref in refs if ref is not None), ""))
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
    arguments = _named(node, ("input", "other"), {"self": "input"})
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


def input_of(node: Node) -> Node | None:
    """Return the value that a layer's call works on: its first argument, or the one called ``input``."""
    value = node.args[0] if node.args else node.kwargs.get("input")
    return value if isinstance(value, Node) else None


def _named(node: Node, names: Sequence[str], renamed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a call's arguments by name; positional ones beyond the names get numbers."""
    found: dict[str, Any] = {names[i] if i < len(names) else f"#{i}": value for i, value in enumerate(node.args)}
    for name, value in node.kwargs.items():
        found[(renamed or {}).get(name, name)] = value
    return found


def _arguments(node: Node, targets: Mapping[Any, Sequence[str]]) -> dict[str, Any] | None:
    names = targets.get(node.target) if node.op == "call_function" else None
    return None if names is None else _named(node, names)


CallT = TypeVar("CallT", LinearCall, ConvolutionCall, BatchNormCall)
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


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _training(index: GraphIndex, node: Node, owner: str) -> bool:
    """Return whether an operation trains: an export graph says so itself, elsewhere the owner of its weight does."""
    module = index.modules.get(owner)
    if isinstance(node.target, OpOverload) or module is None:
        return index.training
    return module.training and index.graph_module.training  # a graph module's own containers say True whatever it is


def _tensor(index: GraphIndex, node: Node, value: object, *, parameter: bool) -> TensorRef | Obstacle | None:
    """Return the registered tensor that a node stands for."""
    if value is None:
        return None
    tensor = index.tensor_of(value) if isinstance(value, Node) else None
    if not isinstance(value, Node) or tensor is None:
        return Obstacle(node.name, "computed-weight", f"node `{node.name}` reads a weight that `{value}` computes")
    name = str(value.target)
    problem = tensor_problem(tensor, parameter=parameter)
    if problem is None and not index.tensor_names(tensor):
        problem = "is a plain attribute, no parameter or buffer"
    if problem is not None:
        return Obstacle(
            _owner(name) or name, tensor_reason(problem), f"`{name}`, read by node `{node.name}`, {problem}"
        )
    return TensorRef(name, tensor, value)


def _parameters(
    index: GraphIndex, node: Node, arguments: Mapping[str, Any]
) -> tuple[Node, TensorRef, TensorRef | None] | Obstacle:
    value = arguments.get("input")
    weight = _tensor(index, node, arguments.get("weight"), parameter=True)
    bias = _tensor(index, node, arguments.get("bias"), parameter=True)
    if isinstance(weight, Obstacle):
        return weight
    if isinstance(bias, Obstacle):
        return bias
    if weight is None or not isinstance(value, Node):
        return Obstacle(node.name, "unsupported-call", f"node `{node.name}` has no input value or no weight")
    return value, weight, bias


def _read_module(
    index: GraphIndex,
    node: Node,
    classes: tuple[type[nn.Module], ...],
    view: Callable[[Node, Node, str, Any], CallT | Obstacle],
) -> CallT | Obstacle | None:
    """Read a call of a module of one of these classes by ``view(node, input, name, module)``."""
    module = index.module_of(node)
    if module is None or not isinstance(module, classes):
        return None
    name = str(node.target)
    problem = module_problem(module, classes)
    if problem is not None:
        return Obstacle(name, problem[0], f"module `{name}` {problem[1]}")
    arguments = _named(node, ("input",))
    value = arguments.pop("input", None)
    if not isinstance(value, Node) or any(extra is not None for extra in arguments.values()):
        return Obstacle(name, "unsupported-call", f"node `{node.name}` calls module `{name}` with further arguments")
    return view(node, value, name, module)


def _module_tensor(module: nn.Module, name: str, key: str) -> TensorRef | None:
    parameter = module._parameters.get(key)
    tensor = module._buffers.get(key) if parameter is None else parameter
    return None if tensor is None else TensorRef(f"{name}.{key}" if name else key, tensor, None)


def _linear_view(node: Node, value: Node, name: str, module: Any) -> LinearCall | Obstacle:
    weight = _module_tensor(module, name, "weight")
    if weight is None:
        return Obstacle(name, "not-a-parameter", f"module `{name}` has no weight")
    return LinearCall(node, value, weight, _module_tensor(module, name, "bias"), module, name, module.training)


def _convolution_view(node: Node, value: Node, name: str, module: Any) -> ConvolutionCall | Obstacle:
    weight = _module_tensor(module, name, "weight")
    if weight is None:
        return Obstacle(name, "not-a-parameter", f"module `{name}` has no weight")
    return ConvolutionCall(
        node, value, weight, _module_tensor(module, name, "bias"), module, name, module.training,
        tuple(module.stride), module.padding if isinstance(module.padding, str) else tuple(module.padding),
        tuple(module.dilation), module.groups, module.transposed, tuple(module.output_padding), module.padding_mode,
    )  # fmt: skip


def _batch_norm_view(node: Node, value: Node, name: str, module: Any) -> BatchNormCall:
    weight, bias, mean, var, counter = (
        _module_tensor(module, name, key)
        for key in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    )
    return BatchNormCall(
        node, value, weight, bias, module, name, module.training, mean, var, counter, module.eps, NORMS[type(module)]
    )
