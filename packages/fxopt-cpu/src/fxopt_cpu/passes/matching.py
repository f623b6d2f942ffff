"""What the passes of this family share: neighbours of a call, and taking a matched site out of a graph."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import Node

from fxopt_core import Refusal
from fxopt_cpu.library import isa
from fxopt_rewrite import Editor, GraphIndex, LayerNormCall, TensorRef, is_python_number, tensor_facts

#: The meanings of the reason codes that passes of this family share.
REASONS = {
    "no-kernels": "fxopt-cpu has no compiled library here: it was installed without a compiler, or for another "
    "processor. Install its wheel, or a C++ compiler and CMake, and install it again; all but int8 and bfloat16 works "
    "without it.",
    "not-on-cpu": "The layer is on another device, and the pass is for CPUs. Move the model: `model.to('cpu')`.",
    "unsupported-dtype": "The layer has a dtype that the operators do not take. Convert it: `model.float()`.",
    "no-operators": "This build of torch, or this processor, has no operators for the layer. Nothing to do: it runs "
    "as it is.",
}


def kernels_refusal(label: str, index: GraphIndex, *nodes: Node) -> Refusal | None:
    """Return a refusal where there is no library."""
    if isa() is not None:
        return None
    return index.refuse(label, "no-kernels", f"`{label}` stays: fxopt-cpu has no compiled library here", *nodes)


def sole_user(node: Node) -> Node | None:
    """Return the only node that reads a value, or None if there are several, or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def is_float(node: Node) -> bool:
    """Return whether a value is known to be a tensor of float32 on a CPU."""
    facts = tensor_facts(node)
    return facts is not None and facts.dtype is torch.float32 and (facts.device is None or facts.device.type == "cpu")


def parameter_of(tensor: Tensor) -> torch.nn.Parameter:
    """Return a parameter of a layer for its new form, without a copy.

    One made in inference mode is copied: it has no version, so that changes would go unnoticed.
    """
    assert isinstance(tensor, torch.nn.Parameter)  # the readers of layers accept nothing else
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False), torch.no_grad():
        return torch.nn.Parameter(tensor.clone(), requires_grad=tensor.requires_grad)


def norm_tensors(norm: LayerNormCall | None) -> dict[str, TensorRef]:
    """Return the tensors of a norm by the names of their parameters; none where there is no norm."""
    refs = {} if norm is None else {"weight": norm.weight, "bias": norm.bias}
    return {key: ref for key, ref in refs.items() if ref is not None}


def take_out(edit: Editor, last: Node, replacement: Node, between: Iterable[Node]) -> None:
    """Let users of the last node read its replacement, and take out what only it used: calls, modules and sizes."""
    inputs = [value for node in (last, *between) for value in node.all_input_nodes]
    edit.replace(last, replacement)
    twin = str(replacement.target) if replacement.op == "call_module" else None
    order = edit.index.position
    for node in sorted(dict.fromkeys(between), key=lambda each: order.get(each, -1), reverse=True):
        if node is not last and not node.users and not edit.is_stale([node]):
            edit.erase(node)
            edit.drop_unused(node, twin)
    edit.drop_unused(last, twin)
    while inputs:
        node = inputs.pop()
        is_size = is_python_number(node) is True or (node.target is getattr and node.args[1:] == ("shape",))
        if node.op in ("call_function", "call_method") and is_size and not node.users and not edit.is_stale([node]):
            inputs += node.all_input_nodes
            edit.erase(node)
