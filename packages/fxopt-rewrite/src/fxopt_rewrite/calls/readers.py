"""Typed views of operations: linear layers, convolutions, norms, embeddings, activations, arithmetic.

A reader returns a record of `fxopt_rewrite.calls.records` for a node that makes such a call, an `Obstacle` if the call
cannot be rewritten, and None for any other node. All readers are built on `read_operation`, which knows the forms of
graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch._ops import OpOverload
from torch.fx import Node

from fxopt_rewrite.calls.operation import Operation, module_tensor, read_call, read_layer
from fxopt_rewrite.calls.records import (
    ActivationCall,
    BatchNormCall,
    ConvolutionCall,
    ElementwiseCall,
    EmbeddingCall,
    LayerNormCall,
    LinearCall,
    Obstacle,
    TensorRef,
)
from fxopt_rewrite.index import GraphIndex
from fxopt_rewrite.layers import tensor_problem
from fxopt_rewrite.ops.tables import words
from fxopt_rewrite.ops.vocabulary import MODULES, signature_of


def owner_of(name: str) -> str:
    """Return the full name of the module that holds a tensor of this name."""
    return name.rpartition(".")[0]


def module_running(node: Node) -> str:
    """Return the full name of the module in whose ``forward`` a node was traced; "" for the root."""
    stack = node.meta.get("nn_module_stack")
    entries = list(stack.values()) if isinstance(stack, dict) else []
    name = entries[-1][0] if entries and isinstance(entries[-1], tuple) and entries[-1] else ""
    # torch writes `layer@1` for the second call of `layer`.
    return str(name).split("@")[0]


def trains(index: GraphIndex, node: Node, owner: str) -> bool:
    """Return whether an operation trains: by its arguments for ATen operators, else by the owner of the weight."""
    module = index.modules.get(owner)
    if isinstance(node.target, OpOverload) or module is None:
        return index.training
    return module.training and index.graph_module.training  # tracing leaves new containers in train mode


def tensor_ref(
    index: GraphIndex, node: Node, value: object, what: str, *, parameter: bool
) -> TensorRef | Obstacle | None:
    """Return the registered tensor that a node reads; ``what`` names its role in the call, for messages."""
    if isinstance(value, TensorRef):
        if value.node is None:  # the module that holds it is a plain one
            return value
        value = value.node
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
        problem = "not-a-parameter", "is a plain attribute, not a parameter or buffer"
    if problem is not None:
        return Obstacle(owner_of(name) or name, problem[0], f"`{name}`, read by node `{node.name}`, {problem[1]}")
    return TensorRef(name, tensor, value)


def _tensors(index: GraphIndex, node: Node, found: Mapping[str, object]) -> dict[str, TensorRef | None] | Obstacle:
    """Return the tensors of a call, by role, or why one of them cannot be rewritten."""
    refs: dict[str, TensorRef | None] = {}
    for key, value in found.items():
        ref = tensor_ref(index, node, value, key.replace("_", " "), parameter=key in ("weight", "bias"))
        if isinstance(ref, Obstacle):
            weight = refs.get("weight")
            return ref if weight is None else replace(ref, site=owner_of(weight.name) or ref.site)
        refs[key] = ref
    return refs


def _weighted(
    index: GraphIndex, operation: Operation, value: object, weight: object, bias: object = None
) -> tuple[Node, TensorRef, TensorRef | None, nn.Module | None, str, bool] | Obstacle:
    """Return the first fields of a record: input, weight, bias, module, its name, and whether it trains."""
    node, module, name = operation.node, operation.module, operation.module_name
    if module is not None and weight is None:
        return Obstacle(name, "not-a-parameter", f"module `{name}` has no weight")
    found = _tensors(index, node, {"weight": weight, "bias": bias})
    if isinstance(found, Obstacle):
        return found
    ref = found["weight"]
    if ref is None or not isinstance(value, Node):
        return Obstacle(node.name, "unsupported-call", f"node `{node.name}` has no input value or no weight")
    return value, ref, found["bias"], *_holder(index, operation, ref)


def _holder(index: GraphIndex, operation: Operation, *refs: TensorRef | None) -> tuple[nn.Module | None, str, bool]:
    """Return the module of a call, its name or else that of the owner of its tensors or "", and whether it trains."""
    if operation.module is not None:
        return operation.module, operation.module_name, operation.module.training
    owner = owner_of(next((ref.name for ref in refs if ref is not None), ""))
    return None, owner, trains(index, operation.node, owner)


_LINEAR = {  # the arguments that are the input, the weight and the bias
    "linear": ("input", "weight", "bias"),
    "addmm": ("mat1", "mat2", "input"),
    "matmul": ("input", "other", ""),
    "mm": ("input", "mat2", ""),
}
_LINEARS = frozenset(_LINEAR)


def read_linear(index: GraphIndex, node: Node, *, transposed: bool = False) -> LinearCall | Obstacle | None:
    """Read a linear layer.

    Args:
        index: facts about the graph module.
        node: the node.
        transposed: whether to read weights of shape (in_features, out_features) too, as in ``Conv1D`` of GPT-2,
            ``torch.addmm`` and ``x @ weight``. Otherwise they are obstacles, with reason ``transposed-weight``.
    """
    operation = read_layer(index, node, _LINEARS)
    if not isinstance(operation, Operation):
        return operation
    arguments, names = operation.arguments, _LINEAR[operation.name]
    value, weight, bias = (arguments.get(name) for name in names)
    module: Any = operation.module
    if not names[2]:
        tensor = index.tensor_of(weight) if isinstance(weight, Node) else None
        if tensor is None or tensor.dim() != 2:
            return None  # a product of computed values is no layer
    turned, name = operation.name != "linear", operation.module_name
    # `Conv1D` gives its result the shape that `nf` says, and cannot run without a bias.
    unlike = turned and module is not None and isinstance(weight, TensorRef) and module.nf != weight.tensor.shape[-1]
    if unlike or (turned and module is not None and bias is None):
        return Obstacle(name, "unsupported-call", f"module `{name}` lacks a bias, or its nf is not that of its weight")
    found = _weighted(index, operation, value, weight, bias)
    if isinstance(found, Obstacle):
        return found
    extra = [key for key, given in arguments.items() if key not in names and given != 1]  # beta or alpha
    if extra:
        message = f"node `{node.name}` is given {', '.join(f'{key}={arguments[key]}' for key in extra)}"
        return Obstacle(found[1].name, "unsupported-call", message)
    call = LinearCall(node, *found, transposed=turned)
    shape, added = tuple(call.weight.tensor.shape), call.bias
    # `F.linear` takes tensors of other shapes than those of a layer, too.
    if len(shape) != 2:
        message = f"`{call.weight.name}` has shape {shape}, and a layer's weight has two dimensions"
        return Obstacle(call.label, "unsupported-call", message)
    if added is not None and tuple(added.tensor.shape) != (call.out_features,):
        message = f"`{added.name}` has shape {tuple(added.tensor.shape)}, expected {(call.out_features,)}"
        return Obstacle(call.label, "unsupported-call", f"{message}; it is broadcast over the result")
    if turned and not transposed:
        message = f"`{call.weight.name}` of shape {shape} is stored as (in, out), and this pass reads (out, in)"
        return Obstacle(call.label, "transposed-weight", message)
    return call


_CONVOLUTIONS = frozenset(f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3)) | {"convolution"}


def read_convolution(index: GraphIndex, node: Node) -> ConvolutionCall | Obstacle | None:
    """Read a convolution over 1 to 3 dimensions, plain or transposed."""
    operation = read_layer(index, node, _CONVOLUTIONS)
    if not isinstance(operation, Operation):
        return operation
    arguments = operation.arguments
    found = _weighted(index, operation, *(arguments.get(key) for key in ("input", "weight", "bias")))
    if isinstance(found, Obstacle):
        return found
    dims, groups, given = found[1].tensor.dim() - 2, arguments["groups"], arguments["padding"]
    stride, dilation = (_numbers(arguments[key], dims) for key in ("stride", "dilation"))
    padding = given if isinstance(given, str) else _numbers(given, dims)
    output_padding = _numbers(arguments.get("output_padding", 0), dims)
    computed = stride is None or dilation is None or padding is None or output_padding is None
    if computed or dims not in (1, 2, 3) or not isinstance(groups, int):
        return Obstacle(found[1].name, "unsupported-call", f"node `{node.name}` computes its own stride or padding")
    transposed = bool(arguments.get("transposed", "transpose" in operation.name))
    mode = arguments.get("padding_mode", "zeros")
    return ConvolutionCall(node, *found, stride, padding, dilation, groups, transposed, output_padding, mode)  # type: ignore[arg-type]  # none is None


def _numbers(value: Any, dims: int) -> tuple[int, ...] | None:
    if isinstance(value, int):
        return (value,) * dims
    if not isinstance(value, list | tuple) or not all(isinstance(item, int) for item in value):
        return None
    return tuple(value) * dims if len(value) == 1 else tuple(value)


_RANKS: Mapping[type[nn.Module], tuple[int, ...]] = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}
_DECOMPOSED_BATCH_NORMS = words("""
    native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit
    _native_batch_norm_legit_no_training _native_batch_norm_legit_functional _batch_norm_no_update
    _batch_norm_with_update _batch_norm_with_update_functional
""")
_BATCH_NORMS = _DECOMPOSED_BATCH_NORMS | {"batch_norm"}
_STATE = ("weight", "bias", "running_mean", "running_var")


def read_batch_norm(index: GraphIndex, node: Node) -> BatchNormCall | Obstacle | None:
    """Read a batch norm: ``nn.BatchNorm1d`` to ``3d``, ``nn.SyncBatchNorm``, or ``batch_norm``."""
    operation = read_layer(index, node, _BATCH_NORMS)
    if not isinstance(operation, Operation):
        return operation
    if operation.name != "batch_norm":
        found = f"node `{node.name}` is a batch norm that was decomposed, into `{node.target}`"
        return Obstacle(node.name, "decomposed", found)
    arguments, module = operation.arguments, operation.module
    refs = _tensors(index, node, {key: arguments.get(key) for key in _STATE})
    if isinstance(refs, Obstacle):
        return refs
    eps, training, value = arguments["eps"], arguments["training"], arguments.get("input")
    if not isinstance(eps, float | int) or not isinstance(training, bool) or not isinstance(value, Node):
        return Obstacle(node.name, "unsupported-call", f"node `{node.name}` computes its own eps or training flag")
    weight, bias, mean, var = (refs[key] for key in _STATE)
    _, name, _ = _holder(index, operation, weight, bias, mean, var)
    counter = module_tensor(index.modules[name], name, "num_batches_tracked")
    ranks = () if module is None else _RANKS.get(type(module), ())
    return BatchNormCall(node, value, weight, bias, module, name, training, mean, var, counter, eps, ranks)


_DECOMPOSED_LAYER_NORMS = frozenset({"native_layer_norm", "_fused_rms_norm"})
_LAYER_NORMS = _DECOMPOSED_LAYER_NORMS | {"layer_norm", "rms_norm"}


def read_layer_norm(index: GraphIndex, node: Node) -> LayerNormCall | Obstacle | None:
    """Read a layer norm, or an RMS norm as a call that is not ``centred``.

    >>> import torch
    >>> index = GraphIndex(torch.fx.symbolic_trace(nn.Sequential(nn.LayerNorm(4))))
    >>> call = read_layer_norm(index, index.nodes[1])
    >>> call.label, call.normalized_shape, call.centred
    ('0', (4,), True)
    """
    operation = read_layer(index, node, _LAYER_NORMS)
    if not isinstance(operation, Operation):
        return operation
    if operation.name in _DECOMPOSED_LAYER_NORMS:
        message = f"node `{node.name}` is a normalisation that was decomposed, into `{node.target}`"
        return Obstacle(node.name, "decomposed", message)
    arguments, centred = operation.arguments, operation.name == "layer_norm"
    refs = _tensors(index, node, {key: arguments.get(key) for key in ("weight", "bias")})
    if isinstance(refs, Obstacle):
        return refs
    value, sizes, eps = arguments.get("input"), arguments["normalized_shape"], arguments["eps"]
    fixed = isinstance(sizes, tuple) and all(type(size) is int for size in sizes)
    if not isinstance(value, Node) or not fixed or not (type(eps) is float or (eps is None and not centred)):
        return Obstacle(node.name, "unsupported-call", f"node `{node.name}` computes its own sizes or eps")
    weight, bias = refs["weight"], refs["bias"]
    return LayerNormCall(node, value, weight, bias, *_holder(index, operation, weight, bias), sizes, eps, centred)


def read_embedding(index: GraphIndex, node: Node) -> EmbeddingCall | Obstacle | None:
    """Read an embedding. A ``max_norm`` is an obstacle: with it, each call writes the weight.

    >>> import torch
    >>> index = GraphIndex(torch.fx.symbolic_trace(nn.Sequential(nn.Embedding(9, 4, padding_idx=0))))
    >>> call = read_embedding(index, index.nodes[1])
    >>> call.label, tuple(call.weight.tensor.shape), call.padding_idx
    ('0', (9, 4), 0)
    """
    operation = read_layer(index, node, frozenset({"embedding"}))
    if not isinstance(operation, Operation):
        return operation
    arguments, padding = operation.arguments, operation.arguments["padding_idx"]
    found = _weighted(index, operation, arguments.get("input"), arguments.get("weight"))
    if isinstance(found, Obstacle):
        return found
    if not (padding is None or type(padding) is int):
        return Obstacle(node.name, "unsupported-call", f"node `{node.name}` computes padding_idx")
    if arguments["max_norm"] is not None:
        site = operation.module_name or node.name
        return Obstacle(site, "mutated", f"`{site}` has a max_norm, so that each call writes its weight")
    if padding is not None and padding < 0:  # counted from the end
        padding += len(found[1].tensor)
    return EmbeddingCall(node, *found, padding)


_OF_MODULES = frozenset(name for cls, name in MODULES.items() if cls.__module__ == "torch.nn.modules.activation")
_ACTIVATIONS = _OF_MODULES - {"softmax", "log_softmax"} | {"clamp", "clamp_min"}


def read_activation(index: GraphIndex, node: Node) -> ActivationCall | Obstacle | None:
    """Read an activation, in place or not: those of ``torch.nn`` that take one value, and clamp and clamp_min.

    Settings that the graph computes are an obstacle.

    >>> import torch
    >>> index = GraphIndex(torch.fx.symbolic_trace(nn.Sequential(nn.GELU("tanh"))))
    >>> call = read_activation(index, index.nodes[1])
    >>> call.name, call.settings, call.inplace
    ('gelu', {'approximate': 'tanh'}, False)
    """
    operation = read_layer(index, node, _ACTIVATIONS)
    if not isinstance(operation, Operation):
        return operation
    settings, name = dict(operation.arguments), operation.name
    value, known = settings.pop("input", None), signature_of(name)
    extra = [key for key, given in settings.items() if key not in known and given is not None]
    computed = [key for key, given in settings.items() if isinstance(given, Node) and key not in extra]
    if not isinstance(value, Node) or extra or computed:
        found = ", ".join([*extra, *computed]) or "no value"
        return Obstacle(node.name, "unsupported-call", f"node `{node.name}` is given {found}")
    settings = {key: given for key, given in settings.items() if key in known}
    return ActivationCall(node, value, name, settings, operation.inplace)


_ARITHMETIC = frozenset({"add", "sub", "mul", "div", "rsub"})


def read_elementwise(node: Node) -> ElementwiseCall | Obstacle | None:
    """Read ``+``, ``-``, ``*`` or ``/`` of two operands, in place or not, and ``rsub`` with its operands exchanged.

    Arithmetic on sizes is read in the same way (see `is_python_number`). A call with ``out=``, or an ``alpha`` that
    the graph computes, is an obstacle.

    >>> import torch
    >>> graph = torch.fx.Graph()
    >>> x = graph.placeholder("x")
    >>> call = read_elementwise(graph.call_method("sub_", (x, 3), {"alpha": 2}))
    >>> call.operation, call.left, call.right, call.alpha, call.inplace
    ('sub', x, 3, 2, True)
    """
    operation = read_call(node)
    if operation is None or operation.name not in _ARITHMETIC:
        return None
    arguments = dict(operation.arguments)
    if not {"input", "other"} <= arguments.keys():
        return None
    left, right = arguments.pop("input"), arguments.pop("other")
    alpha, mode = arguments.pop("alpha", 1), arguments.pop("rounding_mode", None)
    extra = [key for key, value in arguments.items() if value is not None]
    if extra or type(alpha) not in (int, float) or not (mode is None or isinstance(mode, str)):
        found = ", ".join(extra) or f"alpha={alpha}, rounding_mode={mode}"
        return Obstacle(node.name, "unsupported-call", f"node `{node.name}` is given {found}")
    # `rsub(a, b, alpha=c)` is `b - c * a`.
    if operation.name == "rsub":
        return ElementwiseCall(node, "sub", right, left, alpha, mode, operation.inplace)
    return ElementwiseCall(node, operation.name, left, right, alpha, mode, operation.inplace)
