"""Readers of layer calls in every form of graph: linear layers, convolutions, batch norms and divisions.

A reader returns a record of `fxopt_rewrite.calls.records` for a node that makes its call, an `Obstacle` where the call
cannot be rewritten, and None for any other node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn
from torch._ops import OpOverload
from torch.fx import Node

from fxopt_rewrite.calls.records import (
    PLAIN,
    TRANSPOSED,
    ActivationCall,
    BatchNormCall,
    ConvolutionCall,
    LinearCall,
    Obstacle,
    ParameterisedCall,
    TensorRef,
    TrueDivision,
)
from fxopt_rewrite.index import GraphIndex
from fxopt_rewrite.layers import conv1d_class, module_problem, tensor_problem
from fxopt_rewrite.ops import forms

CallT = TypeVar("CallT", bound=ParameterisedCall | ActivationCall)


def named_arguments(node: Node, names: Sequence[str], renamed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a call's arguments by name; positional ones beyond the names are numbered."""
    found: dict[str, Any] = {names[i] if i < len(names) else f"#{i}": value for i, value in enumerate(node.args)}
    for name, value in node.kwargs.items():
        found[(renamed or {}).get(name, name)] = value
    return found


def arguments_of(node: Node, targets: Mapping[Any, Sequence[str]]) -> dict[str, Any] | None:
    """Return the arguments of a call of one of these functions by name; None for any other node."""
    names = targets.get(node.target) if node.op == "call_function" else None
    return None if names is None else named_arguments(node, names)


def owner_of(name: str) -> str:
    """Return the full name of the module that holds a tensor of this name."""
    return name.rpartition(".")[0]


def module_running(node: Node) -> str:
    """Return the full name of the module in whose ``forward`` a node was traced; "" for the root."""
    stack = node.meta.get("nn_module_stack")
    entries = list(stack.values()) if isinstance(stack, dict) else []
    name = entries[-1][0] if entries and isinstance(entries[-1], tuple) and entries[-1] else ""
    return str(name).split("@")[0]


def trains(index: GraphIndex, node: Node, owner: str) -> bool:
    """Return whether an operation trains: ATen operators say so themselves, else the owner of the weight does."""
    module = index.modules.get(owner)
    if isinstance(node.target, OpOverload) or module is None:
        return index.training
    return module.training and index.graph_module.training  # tracing leaves new containers in train mode


def tensor_ref(
    index: GraphIndex, node: Node, value: object, what: str, *, parameter: bool
) -> TensorRef | Obstacle | None:
    """Return the registered tensor that a node reads; ``what`` names its role in the call, for messages."""
    if value is None:
        return None
    tensor = index.tensor_of(value) if isinstance(value, Node) else None
    if not isinstance(value, Node) or tensor is None:
        is_input = isinstance(value, Node) and value.op == "placeholder"
        how = f"is an input, `{value}`" if is_input else f"`{value}` computes"
        site = module_running(node) or node.name
        return Obstacle(site, "computed-weight", f"node `{node.name}` reads a {what} that {how}")
    name = str(value.target)
    problem = tensor_problem(tensor, parameter=parameter)
    if problem is None and not index.tensor_names(tensor):
        problem = "not-a-parameter", "is a plain attribute, no parameter or buffer"
    if problem is not None:
        return Obstacle(owner_of(name) or name, problem[0], f"`{name}`, read by node `{node.name}`, {problem[1]}")
    return TensorRef(name, tensor, value)


def weight_and_bias(
    index: GraphIndex, node: Node, arguments: Mapping[str, Any]
) -> tuple[Node, TensorRef, TensorRef | None] | Obstacle:
    """Return the input, weight and bias of a call, or why they cannot be rewritten."""
    value = arguments.get("input")
    weight = tensor_ref(index, node, arguments.get("weight"), "weight", parameter=True)
    bias = tensor_ref(index, node, arguments.get("bias"), "bias", parameter=True)
    if isinstance(weight, Obstacle):
        return weight
    if isinstance(bias, Obstacle):
        return bias if weight is None else replace(bias, site=owner_of(weight.name) or bias.site)
    if weight is None or not isinstance(value, Node):
        return Obstacle(node.name, "unsupported-call", f"node `{node.name}` has no input value or no weight")
    return value, weight, bias


def read_module(
    index: GraphIndex,
    node: Node,
    classes: tuple[type[nn.Module], ...],
    view: Callable[[Node, Node, str, Any], CallT | Obstacle],
) -> CallT | Obstacle | None:
    """Read a call of a module of one of these classes by ``view(node, input, name, module)``."""
    module, name = index.module_of(node), str(node.target)
    if module is None or not isinstance(module, classes):
        kind = type(module)
        if ".quantized." not in kind.__module__ or kind.__name__ not in [cls.__name__ for cls in classes]:
            return None
        return Obstacle(name, "not-a-parameter", f"module `{name}` is quantized ({kind.__module__})")
    problem = module_problem(module, classes)
    if problem is not None:
        return Obstacle(name, problem[0], f"module `{name}` {problem[1]}")
    arguments = named_arguments(node, ("input",), {"x": "input"} if module.__class__ is conv1d_class() else None)
    value = arguments.pop("input", None)
    if not isinstance(value, Node) or any(extra is not None for extra in arguments.values()):
        return Obstacle(name, "unsupported-call", f"node `{node.name}` calls module `{name}` with further arguments")
    return view(node, value, name, module)


def module_tensor(module: nn.Module, name: str, key: str) -> TensorRef | None:
    """Return a parameter or buffer of a module with this full name; None if it has none."""
    parameter = module._parameters.get(key)
    tensor = module._buffers.get(key) if parameter is None else parameter
    return None if tensor is None else TensorRef(f"{name}.{key}" if name else key, tensor, None)


def read_linear(index: GraphIndex, node: Node, *, transposed: bool = False) -> LinearCall | Obstacle | None:
    """Read a linear layer: ``nn.Linear``, ``F.linear`` or ``aten.linear``.

    Args:
        index: facts about the graph module.
        node: the node.
        transposed: whether to read weights of shape (in_features, out_features) too, as in ``Conv1D`` of GPT-2,
            ``torch.addmm`` and ``x @ weight``. Otherwise they are obstacles, with reason ``transposed-weight``.
    """
    call = _read_layer(index, node)
    if isinstance(call, LinearCall) and call.transposed and not transposed:
        shape, form = tuple(call.weight.tensor.shape), "(in, out), and this pass reads (out, in)"
        return Obstacle(call.label, "transposed-weight", f"`{call.weight.name}` of shape {shape} is stored as {form}")
    return call


def input_of(node: Node) -> Node | None:
    """Return the value that a layer's call works on: its first argument, or the one called ``input``.

    That of ``addmm`` is the second, after the bias.
    """
    if _layer_names(node) is forms.ADDMM:
        value = node.args[1] if len(node.args) > 1 else node.kwargs.get("mat1")
    else:
        names = (name for name in ("input", "self", "x") if name in node.kwargs)
        value = node.args[0] if node.args else node.kwargs.get(next(names, "input"))
    return value if isinstance(value, Node) else None


def _layer_names(node: Node) -> tuple[str, ...] | None:
    """Return the names of the positional arguments of a linear layer's operation; None for any other node."""
    if node.op == "call_method":
        return forms.TRANSPOSED_METHODS.get(str(node.target))
    if node.op != "call_function":
        return None
    return forms.LINEAR_TARGETS.get(node.target) or forms.TRANSPOSED_TARGETS.get(node.target)


_KEYWORDS = {forms.ADDMM: forms.ADDMM_KEYWORDS, forms.PRODUCT: forms.PRODUCT_KEYWORDS}


def _read_layer(index: GraphIndex, node: Node) -> LinearCall | Obstacle | None:
    if node.op == "call_module":
        conv1d = conv1d_class()
        return read_module(index, node, (nn.Linear,) if conv1d is None else (nn.Linear, conv1d), _linear_view)
    names = _layer_names(node)
    if names is None:
        return None
    arguments = named_arguments(node, names, _KEYWORDS.get(names))
    if names is forms.PRODUCT:
        weight = arguments.get("weight")
        tensor = index.tensor_of(weight) if isinstance(weight, Node) else None
        if tensor is None or tensor.dim() != 2:
            return None  # a product of computed values is no layer
    found = weight_and_bias(index, node, arguments)
    if isinstance(found, Obstacle):
        return found
    extra = [name for name, value in arguments.items() if name not in ("input", "weight", "bias") and value != 1]
    if extra:  # beta or alpha
        message = f"node `{node.name}` is given {', '.join(f'{name}={arguments[name]}' for name in extra)}"
        return Obstacle(found[1].name, "unsupported-call", message)
    owner = owner_of(found[1].name)
    training = trains(index, node, owner)
    return _fitting(LinearCall(node, *found, None, owner, training, transposed=names in _KEYWORDS))


def _linear_view(node: Node, value: Node, name: str, module: Any) -> LinearCall | Obstacle:
    weight, bias = module_tensor(module, name, "weight"), module_tensor(module, name, "bias")
    if weight is None:
        return Obstacle(name, "not-a-parameter", f"module `{name}` has no weight")
    transposed = type(module) is not nn.Linear
    if transposed and (bias is None or module.nf != weight.tensor.shape[-1]):
        return Obstacle(name, "unsupported-call", f"module `{name}` lacks a bias, or its nf is not that of its weight")
    return _fitting(LinearCall(node, value, weight, bias, module, name, module.training, transposed=transposed))


def _fitting(call: LinearCall) -> LinearCall | Obstacle:
    """Return the call, or an obstacle if its tensors have no layer's shapes: ``F.linear`` takes others too."""
    weight, bias = call.weight.tensor, call.bias
    if weight.dim() != 2:
        message = f"`{call.weight.name}` has shape {tuple(weight.shape)}, and a layer's weight has two dimensions"
        return Obstacle(call.label, "unsupported-call", message)
    if bias is not None and tuple(bias.tensor.shape) != (call.out_features,):
        found, expected = tuple(bias.tensor.shape), (call.out_features,)
        message = f"`{bias.name}` has shape {found}, expected {expected}; it is broadcast over the result"
        return Obstacle(call.label, "unsupported-call", message)
    return call


def read_convolution(index: GraphIndex, node: Node) -> ConvolutionCall | Obstacle | None:
    """Read a convolution over 1 to 3 dimensions, plain or transposed, of any form."""
    if node.op == "call_module":
        return read_module(index, node, (*PLAIN, *TRANSPOSED), _convolution_view)
    arguments = arguments_of(node, forms.CONV_TARGETS)
    if arguments is None:
        return None
    found = weight_and_bias(index, node, arguments)
    if isinstance(found, Obstacle):
        return found
    dims = found[1].tensor.dim() - 2
    stride, dilation = (_numbers(arguments.get(name, 1), dims) for name in ("stride", "dilation"))
    given, groups = arguments.get("padding", 0), arguments.get("groups", 1)
    padding = given if isinstance(given, str) else _numbers(given, dims)
    output_padding = _numbers(arguments.get("output_padding", 0), dims)
    computed = Obstacle(found[1].name, "unsupported-call", f"node `{node.name}` computes its own stride or padding")
    if stride is None or dilation is None or padding is None or output_padding is None:
        return computed
    if dims not in (1, 2, 3) or not isinstance(groups, int):
        return computed
    transposed = bool(arguments.get("transposed", forms.CONV_TARGETS[node.target] is forms.CONV_TRANSPOSE))
    owner = owner_of(found[1].name)
    return ConvolutionCall(
        node, *found, None, owner, trains(index, node, owner),
        stride, padding, dilation, groups, transposed, output_padding, "zeros",
    )  # fmt: skip


def _numbers(value: Any, dims: int) -> tuple[int, ...] | None:
    if isinstance(value, int):
        return (value,) * dims
    if not isinstance(value, list | tuple) or not all(isinstance(item, int) for item in value):
        return None
    return tuple(value) * dims if len(value) == 1 else tuple(value)


def _convolution_view(node: Node, value: Node, name: str, module: Any) -> ConvolutionCall | Obstacle:
    weight = module_tensor(module, name, "weight")
    if weight is None:
        return Obstacle(name, "not-a-parameter", f"module `{name}` has no weight")
    return ConvolutionCall(
        node, value, weight, module_tensor(module, name, "bias"), module, name, module.training,
        tuple(module.stride), module.padding if isinstance(module.padding, str) else tuple(module.padding),
        tuple(module.dilation), module.groups, module.transposed, tuple(module.output_padding), module.padding_mode,
    )  # fmt: skip


# Their classes are not derived from those of NORMS.
_LAZY_NORMS = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)


def read_batch_norm(index: GraphIndex, node: Node) -> BatchNormCall | Obstacle | None:
    """Read a batch norm: ``nn.BatchNorm1d`` to ``3d``, or ``batch_norm`` of ``F``, ``torch`` or ``aten``."""
    if node.op == "call_module":
        return read_module(index, node, (*forms.NORMS, *_LAZY_NORMS), _batch_norm_view)
    if node.op == "call_function" and node.target in forms.DECOMPOSED_BATCH_NORMS:
        found = f"node `{node.name}` is a batch norm that was decomposed, into `{node.target}`"
        return Obstacle(node.name, "decomposed", found)
    arguments = arguments_of(node, forms.BATCH_NORM_TARGETS)
    if arguments is None:
        return None
    refs: list[TensorRef | None] = []
    for name in ("weight", "bias", "running_mean", "running_var"):
        given, is_parameter = arguments.get(name), name in ("weight", "bias")
        ref = tensor_ref(index, node, given, name.replace("_", " "), parameter=is_parameter)
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


def _batch_norm_view(node: Node, value: Node, name: str, module: Any) -> BatchNormCall:
    weight, bias, mean, var, counter = (
        module_tensor(module, name, key)
        for key in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    )
    eps, ranks = module.eps, forms.NORMS[type(module)]
    return BatchNormCall(node, value, weight, bias, module, name, module.training, mean, var, counter, eps, ranks)


def read_true_division(index: GraphIndex, node: Node) -> TrueDivision | Obstacle | None:
    """Read a division: ``/``, ``torch.div``, ``x.div``, their in-place forms, or ``aten.div``."""
    if node.op == "call_method":
        product: Any = forms.METHOD_PRODUCTS.get(str(node.target))
    else:
        product = forms.PRODUCTS.get(node.target) if node.op == "call_function" else None
    if product is None:
        return None
    arguments = named_arguments(node, ("input", "other"), {"self": "input"})
    if arguments.get("rounding_mode") is not None:
        constant = not isinstance(arguments.get("other"), Node)  # no pass looks for division by a tensor
        return Obstacle(node.name, "rounding-mode", f"node `{node.name}` rounds its quotient") if constant else None
    extra = set(arguments) - {"input", "other", "rounding_mode"}
    value = arguments.get("input")
    if not isinstance(value, Node) or "other" not in arguments:
        return None
    if extra:
        return Obstacle(node.name, "unsupported-call", f"node `{node.name}` is given {', '.join(sorted(extra))}")
    return TrueDivision(node, value, arguments["other"], product)
