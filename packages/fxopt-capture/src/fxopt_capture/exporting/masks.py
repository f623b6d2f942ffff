"""Find out which other dtypes and values a mask may have, by running model and graph on such masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from fxopt_capture.call.arguments import CallForm
from fxopt_capture.call.guards import GUARDS, InputGuards, guards_of
from fxopt_capture.exporting.compare import GraphError, difference_in_call
from fxopt_rewrite import dtype_kind

_DTYPES = (torch.bool, torch.int64, torch.float32)


def compare_masks(model: nn.Module, form: CallForm, captured: GraphModule, inputs: Mapping[str, object]) -> None:
    """Compare model and graph on masks of zeros and ones other than those of the example, and adapt the guards.

    The inputs with "mask" in their names are tried one after the other. In its own dtype, a mask with the other form of
    values is refused from then on if the graph differs. In each other kind of dtype, a mask with a zero in each row is
    accepted from then on if the graph does not differ. A mask that the model refuses changes nothing.
    """
    for index, spec in enumerate(guards_of(captured).specs):
        value = inputs.get(spec.name)
        if "mask" not in spec.name or not isinstance(value, torch.Tensor) or not value.dim() or not _is_mask(value):
            continue
        if spec.kind in ("bool", "integer"):
            given = {**inputs, spec.name: _other_form(value)}
            if not _agrees(model, form, captured, given, model_raises=True):
                _set(captured, index, ones=bool(value.all()))
        mask = value.clone()
        mask[..., -1:] = 0
        for dtype in _DTYPES:
            if (kind := dtype_kind(dtype)) != spec.kind:
                former = guards_of(captured)
                _set(captured, index, also=(*former.specs[index].also, kind))
                given = {**inputs, spec.name: mask.to(dtype)}
                if not _agrees(model, form, captured, given, model_raises=False):
                    captured._modules[GUARDS] = former


def _is_mask(value: torch.Tensor) -> bool:
    return bool(((value == 0) | (value == 1)).all())


def _other_form(mask: torch.Tensor) -> torch.Tensor:
    """Return ones for a mask with zeros; for a mask of ones, one whose first row ends in a zero if possible."""
    if not mask.all():
        return torch.ones_like(mask)
    padded = mask.clone()
    if mask.numel() and mask.size(-1) > 1:
        (padded[0] if mask.dim() > 1 else padded)[..., -1] = 0
    return padded


def _set(captured: GraphModule, index: int, **demands: Any) -> None:
    """Give a captured module guards with other demands on one input."""
    guards = guards_of(captured)
    specs = [replace(spec, **demands) if place == index else spec for place, spec in enumerate(guards.specs)]
    changed = InputGuards(specs, guards.conditions, guards.mode, guards.module_dtype, guards.baked)
    changed.training, captured._modules[GUARDS] = guards.training, changed


def _agrees(
    model: nn.Module, form: CallForm, captured: GraphModule, inputs: Mapping[str, object], *, model_raises: bool
) -> bool:
    """Return whether model and graph do the same, or `model_raises` if the model does not take these inputs."""
    try:
        return difference_in_call(model, form, captured, inputs) is None
    except GraphError:
        return False
    except Exception:  # whatever the model raises
        return model_raises
