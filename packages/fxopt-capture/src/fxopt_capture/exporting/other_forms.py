"""Find out which other values a mask may have, and which strides an input, by running model and graph on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxopt_capture.call.arguments import CallForm
from fxopt_capture.call.guards import GUARDS, LAYOUTS, InputGuards, guards_of
from fxopt_capture.exporting.compare import GraphError, difference_in_call
from fxopt_capture.exporting.observer import LAYOUT
from fxopt_core.errors import CaptureError


def compare_other_forms(
    model: nn.Module, form: CallForm, captured: GraphModule, inputs: Mapping[str, object], reads: Mapping[str, str]
) -> None:
    """Compare model and graph on other forms of the example, and adapt the guards.

    These are, one input after the other: masks of zeros and ones (boolean and integer inputs with "mask" in their
    names) with other values, and tensors with other strides if the model reads strides. The graph refuses the other
    form from then on if it differs. A form that the model refuses changes nothing.
    """
    leaves = pytree.tree_leaves(dict(inputs))
    for index, spec in enumerate(guards_of(captured).specs):
        value = leaves[index]
        if not isinstance(value, torch.Tensor) or not value.dim():
            continue
        agrees = partial(_agrees, model, form, captured, inputs, index)
        is_mask = "mask" in spec.name and spec.kind in ("bool", "integer") and ((value == 0) | (value == 1)).all()
        if is_mask and not agrees(_other_form(value)):
            _demand(captured, index, ones=bool(value.all()))
        if LAYOUT in reads and value.dim() > 1 and not agrees(_other_layout(value)):
            layout = next((each for each in LAYOUTS if value.is_contiguous(memory_format=each)), None)
            if layout is None:
                raise CaptureError(
                    f"{type(model).__name__} reads strides at {reads[LAYOUT]}, and `{spec.name}` is not contiguous, so "
                    f"that the graph would be for its strides only; give a contiguous example"
                )
            _demand(captured, index, layout=layout)


def _demand(captured: GraphModule, index: int, **demands: Any) -> None:
    """Let the guards of a captured module refuse more forms of an input."""
    guards = guards_of(captured)
    specs = [*guards.specs]
    specs[index] = replace(specs[index], **demands)
    changed = InputGuards(specs, guards.conditions, guards.mode, guards.module_dtype, guards.baked)
    changed.training, captured._modules[GUARDS] = guards.training, changed


def _other_form(mask: torch.Tensor) -> torch.Tensor:
    """Return ones for a mask with zeros; for a mask of ones, one whose first row ends in a zero if possible."""
    if not mask.all():
        return torch.ones_like(mask)
    padded = mask.clone()
    if mask.numel() and mask.size(-1) > 1:
        (padded[0] if mask.dim() > 1 else padded)[..., -1] = 0
    return padded


def _other_layout(value: torch.Tensor) -> torch.Tensor:
    """Return the same values with other strides, contiguous ones if they are not."""
    if not value.is_contiguous():
        return value.contiguous()
    last = value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value
    return value.mT.contiguous().mT if last.is_contiguous() else last


def _agrees(
    model: nn.Module,
    form: CallForm,
    captured: GraphModule,
    inputs: Mapping[str, object],
    index: int,
    value: torch.Tensor,
) -> bool:
    """Return whether model and graph do the same with this tensor in an input, or the model does not take it."""
    leaves, spec = pytree.tree_flatten(dict(inputs))
    leaves[index] = value
    try:
        return difference_in_call(model, form, captured, pytree.tree_unflatten(leaves, spec)) is None
    except GraphError:
        return False
    except Exception:  # whatever the model raises
        return True
