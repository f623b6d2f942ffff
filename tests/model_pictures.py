"""What property tests compare: graphs of drawn models, what these compute, and what a caller could see change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from generated_operations import OpaqueTracer
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxopt_capture import capture
from fxopt_core import FxoptError, iter_nodes
from fxopt_rewrite import infer_shapes

Results = list["Tensor | None"]
FORMS = ("traced", "exported", "captured")
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 6e-2, torch.float16: 1e-2}


def captured(model: nn.Module, form: str, inputs: Sequence[Tensor]) -> GraphModule:
    """Return a model as a graph of one of the forms, with shapes; the batch is dynamic where that is possible."""
    inputs = tuple(each.clone() for each in inputs)
    if form == "traced":
        return infer_shapes(GraphModule(model, OpaqueTracer().trace(model)), *inputs)
    shapes = tuple({0: torch.export.Dim.AUTO} for _ in inputs)
    if form == "captured":
        return capture(model, inputs, dynamic_shapes=shapes)
    program = torch.export.export(model, inputs, dynamic_shapes=shapes, strict=False)
    return program.module(check_guards=False)  # sizes are checked; the guards that torch adds do not pickle


def bits(tensor: Tensor) -> str:
    """Return the values of a tensor, bit for bit, as text."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()).hex()


def state_of(model: nn.Module, *, memory: bool = True) -> list[object]:
    """Return all that a caller could see change: tensors by identity, memory and value, flags, modes, hooks.

    Where tensors lie in memory is left out on demand: `MergeLinears(share_storage=True)` moves those of the caller.
    """
    rows: list[object] = []
    for name, module in model.named_modules(remove_duplicate=False):
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        rows.append((name, id(module), type(module), module.training, hooks, *sorted(vars(module))))
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        gradient = None if tensor.grad is None else bits(tensor.grad)
        place = (tensor.data_ptr(), tensor._version) if memory else ()
        flags = (tensor.stride(), tensor.requires_grad, tensor.dtype)
        rows.append((name, id(tensor), place, flags, bits(tensor), gradient))
    return [*rows, list(model.state_dict())]


def graph_of(graph_module: GraphModule) -> list[Any]:
    """Return nodes, modules, tensors with their bits, and code, as plain data."""
    nodes = [
        (node.name, node.op, str(node.target), str(node.args), str(node.kwargs), sorted(map(str, node.users)))
        for node in iter_nodes(graph_module.graph)
    ]
    modules = [
        (name, name and type(module).__name__, module.training)
        for name, module in graph_module.named_modules(remove_duplicate=False)
    ]
    saved = graph_module.state_dict()
    tensors = [
        *graph_module.named_parameters(remove_duplicate=False),
        *graph_module.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    rows = [
        (name, first.setdefault(id(t), name), name in saved, t.dtype, tuple(t.shape), t.requires_grad, bits(t))
        for name, t in tensors
    ]
    return [nodes, modules, [list(saved), *rows], graph_module.code]


def same_but_for_rounding(one: GraphModule, other: GraphModule) -> None:
    """Check that the tensors of two graph modules agree but for rounding."""
    rows, others = graph_of(one)[2], graph_of(other)[2]
    assert [row[:-1] for row in rows] == [row[:-1] for row in others]
    state = other.state_dict()
    for key, value in one.state_dict().items():
        torch.testing.assert_close(value, state[key], rtol=1e-4, atol=1e-4, equal_nan=True)


def results(module: Callable[..., Any], inputs: Sequence[Tensor], parameters: Sequence[Tensor] = ()) -> Results:
    """Return outputs, inputs as they are afterwards, and gradients by inputs and parameters.

    Gradients are None where torch refuses them.
    """
    leaves = [each.clone(memory_format=torch.preserve_format).requires_grad_() for each in inputs]
    given = [each * 1.0 for each in leaves]  # a leaf that needs gradients may not be written in place
    outputs: Results = [leaf for leaf in pytree.tree_leaves(module(*given)) if isinstance(leaf, Tensor)]
    total = torch.stack([output.double().sum() for output in outputs if output is not None]).sum()
    by = [*leaves, *parameters]
    gradients: Sequence[Tensor | None] = [torch.zeros_like(each) for each in by]
    if total.requires_grad:
        try:
            gradients = torch.autograd.grad(total, by, allow_unused=True, materialize_grads=True)
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            gradients = [None] * len(by)
    return [*outputs, *given, *gradients]


def close(found: Results, expected: Results) -> None:
    """Check that results agree to the tolerance of their dtype; a gradient that torch refused before may exist now."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if other is None:
            continue
        assert one is not None
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        rtol = TOLERANCE[other.dtype]
        finite = other.detach().double()[other.isfinite()]
        scale = max(1.0, finite.abs().max().item() if finite.numel() else 1.0)
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol * scale, equal_nan=True)


def shared_parameters(model: nn.Module, graph_module: GraphModule) -> list[Tensor]:
    """Return the parameters that both have."""
    there = {id(parameter) for parameter in graph_module.parameters()}
    return [each for each in model.parameters() if each.requires_grad and id(each) in there]


def other_results(module: Callable[..., Any], several: Sequence[Sequence[Tensor]]) -> list[Results | None]:
    """Return the results for inputs of other sizes; None where the module takes no such."""
    found: list[Results | None] = []
    for inputs in several:
        try:
            found.append(results(module, inputs))
        except (RuntimeError, ValueError, AssertionError, FxoptError):
            found.append(None)
    return found
