"""Run a model and its graph on the same inputs, without a trace left in either, and compare."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from .arguments import CallForm
from .preserving import preserved

# Largest difference that the order of sums explains, relative to the largest value of the output.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def difference(
    model: nn.Module,
    form: CallForm,
    graph_module: nn.Module,
    inputs: Mapping[str, object],
    constants: Mapping[str, object] = MappingProxyType({}),
    *,
    weights: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> str | None:
    """Return how the graph's outputs differ from the model's on `inputs`, or None where they agree.

    Buffers, the random state and the inputs stay as they are. Exceptions of either pass through.

    Args:
        model: the model.
        form: how it is called.
        graph_module: the graph; it takes the inputs by name.
        inputs: by name.
        constants: what the graph module is given besides.
        weights: what both have in place of parameters and buffers of these names.
    """
    args, kwargs = form.arguments(_cloned(inputs))
    with preserved(model), torch.no_grad():
        expected = functional_call(model, _tensors(model, weights), tuple(args), kwargs)
    with preserved(graph_module), torch.no_grad():
        tensors = _tensors(graph_module, weights)
        found = functional_call(graph_module, tensors, (), {**_cloned(inputs), **constants})
    return _mismatch(expected, found)


def _cloned(inputs: Mapping[str, object]) -> dict[str, object]:
    return {
        name: pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), value)
        for name, value in inputs.items()
    }


def _tensors(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what a module is called with instead of its own tensors: copies of its buffers, and weights it has not."""
    names = dict(module.named_parameters(remove_duplicate=False)).keys() if weights else ()
    buffers = {name: weights.get(name, buffer).clone() for name, buffer in module.named_buffers()}
    return {**{name: weights[name] for name in names if name in weights}, **buffers}


def _mismatch(expected: object, found: object) -> str | None:
    if type(expected) is not type(found):
        return f"the output is a {type(found).__name__} where the model returns a {type(expected).__name__}"
    pairs = list(zip(pytree.tree_leaves_with_path(expected), pytree.tree_leaves_with_path(found), strict=False))
    if len(pairs) != len(pytree.tree_leaves(expected)) or len(pairs) != len(pytree.tree_leaves(found)):
        return "the outputs have another structure"
    for (path, left), (_, right) in pairs:
        name = f"output{pytree.keystr(path)}"
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
            if (reason := _tensor_mismatch(left, right)) is not None:
                return f"{name} {reason}"
        elif type(left) is not type(right) or left != right:
            return f"{name} is {right!r} where the model returns {left!r}"
    return None


def _tensor_mismatch(expected: torch.Tensor, found: torch.Tensor) -> str | None:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"is {found.dtype} of shape {tuple(found.shape)}, not {expected.dtype} of shape {tuple(expected.shape)}"
    tolerance = _TOLERANCE.get(expected.dtype)
    if tolerance is None:
        return None if torch.equal(expected, found) else "has other values"
    scale = max(1.0, float(expected.nan_to_num(0, 0, 0).abs().max())) if expected.numel() else 1.0
    if torch.allclose(found, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
        return None
    return f"differs by up to {float((found - expected).abs().max()):.3g}"
