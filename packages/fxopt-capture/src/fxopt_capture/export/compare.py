"""Run a model and its graph on the same inputs, without a trace left in either, and compare."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxopt_capture.call.arguments import CallForm
from fxopt_core.state.snapshot import kept

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

    The graph module gets the inputs and `constants` by name. Both have `weights` in place of the parameters and buffers
    of these names.
    """
    args, kwargs = form.arguments(_cloned(inputs))
    with kept(model), torch.no_grad():
        _stand_in(model, weights)
        expected = model(*args, **kwargs)
    with kept(graph_module), torch.no_grad():
        _stand_in(graph_module, weights)
        found = graph_module(**_cloned(inputs), **constants)
    return _mismatch(expected, found)


def effect_of(
    attributes: Mapping[str, object], model: nn.Module, form: CallForm, inputs: Mapping[str, object]
) -> str | None:
    """Return how a model's outputs on `inputs` change with other values of attributes, or None where they do not.

    The model stays as it is. Exceptions of it pass through. `attributes` has the other values by dotted name.
    """
    outputs = []
    for changes in ({}, attributes):
        with kept(model), torch.no_grad():
            for name, value in changes.items():
                owner, _, last = name.rpartition(".")
                vars(model.get_submodule(owner))[last] = value
            _stand_in(model, {})
            args, kwargs = form.arguments(_cloned(inputs))
            outputs.append(model(*args, **kwargs))
    return _mismatch(*outputs)


def _cloned(inputs: Mapping[str, object]) -> dict[str, object]:
    return {
        name: pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), value)
        for name, value in inputs.items()
    }


def _stand_in(root: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Give a module copies of its buffers to write to, and `weights`; `kept` gives it back its own."""
    copies: dict[int, torch.Tensor] = {}
    for prefix, module in root.named_modules():
        path = f"{prefix}." if prefix else ""
        for name, buffer in module._buffers.items():
            if buffer is not None:
                value = weights.get(path + name, buffer)
                module._buffers[name] = copies.setdefault(id(buffer), value.clone())
        for name in module._parameters if weights else ():
            if path + name in weights:
                vars(module)["_parameters"][name] = weights[path + name]


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
