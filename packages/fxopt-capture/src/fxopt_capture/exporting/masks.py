"""Find out which other values a mask may have, by running model and graph on such a mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.fx import GraphModule

from fxopt_capture.call.arguments import CallForm
from fxopt_capture.call.guards import GUARDS, InputGuards, guards_of
from fxopt_capture.exporting.compare import GraphError, difference_in_call


def compare_masks(model: nn.Module, form: CallForm, captured: GraphModule, inputs: Mapping[str, object]) -> None:
    """Compare model and graph on masks of zeros and ones other than those of the example, and adapt the guards.

    The boolean and integer inputs with "mask" in their names are tried one after the other. The other form of values is
    refused from then on if the graph differs. A mask that the model refuses changes nothing.
    """
    for index, spec in enumerate(guards_of(captured).specs):
        value = inputs.get(spec.name)
        if "mask" not in spec.name or spec.kind not in ("bool", "integer") or not isinstance(value, torch.Tensor):
            continue
        if value.dim() and bool(((value == 0) | (value == 1)).all()):
            given = {**inputs, spec.name: _other_form(value)}
            if not _agrees(model, form, captured, given):
                guards = guards_of(captured)
                specs = list(guards.specs)
                specs[index] = replace(spec, ones=bool(value.all()))
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


def _agrees(model: nn.Module, form: CallForm, captured: GraphModule, inputs: Mapping[str, object]) -> bool:
    """Return whether model and graph do the same, or the model does not take these inputs."""
    try:
        return difference_in_call(model, form, captured, inputs) is None
    except GraphError:
        return False
    except Exception:  # whatever the model raises
        return True
