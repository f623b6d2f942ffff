"""What the readers of `fxopt_core.views` share: arguments by name, tensors by the nodes that read them, modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn
from torch._ops import OpOverload
from torch.fx import Node

from fxopt_core.calls import BatchNormCall, ConvolutionCall, LinearCall, Obstacle, TensorRef
from fxopt_core.index import GraphIndex
from fxopt_core.module_state import conv1d_class, module_problem, tensor_problem, tensor_reason

CallT = TypeVar("CallT", LinearCall, ConvolutionCall, BatchNormCall)


def named_arguments(node: Node, names: Sequence[str], renamed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a call's arguments by name; positional ones beyond the names get numbers."""
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
    """Return the full name of the module whose ``forward`` a tracer or an export made a node of; "" for the root."""
    stack = node.meta.get("nn_module_stack")
    entries = list(stack.values()) if isinstance(stack, dict) else []
    name = entries[-1][0] if entries and isinstance(entries[-1], tuple) and entries[-1] else ""
    return str(name).split("@")[0]


def trains(index: GraphIndex, node: Node, owner: str) -> bool:
    """Return whether an operation trains: an export graph says so itself, elsewhere the owner of its weight does."""
    module = index.modules.get(owner)
    if isinstance(node.target, OpOverload) or module is None:
        return index.training
    return module.training and index.graph_module.training  # a graph module's own containers say True whatever it is


def tensor_ref(
    index: GraphIndex, node: Node, value: object, what: str, *, parameter: bool
) -> TensorRef | Obstacle | None:
    """Return the registered tensor that a node stands for; ``what`` says in words what it is to the call."""
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
        problem = "is a plain attribute, no parameter or buffer"
    if problem is not None:
        return Obstacle(
            owner_of(name) or name, tensor_reason(problem), f"`{name}`, read by node `{node.name}`, {problem}"
        )
    return TensorRef(name, tensor, value)


def weight_and_bias(
    index: GraphIndex, node: Node, arguments: Mapping[str, Any]
) -> tuple[Node, TensorRef, TensorRef | None] | Obstacle:
    """Return the input of a call with its weight and bias, or why they cannot be rewritten."""
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
    """Return a parameter or buffer of the module with this full name."""
    parameter = module._parameters.get(key)
    tensor = module._buffers.get(key) if parameter is None else parameter
    return None if tensor is None else TensorRef(f"{name}.{key}" if name else key, tensor, None)
