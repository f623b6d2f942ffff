"""Find out which other kinds of dtype a mask may have, by running model and graph on masks of them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import replace

import torch
from torch import nn
from torch.fx import GraphModule

from fxopt_capture.call.arguments import CallForm
from fxopt_capture.call.guards import GUARDS, InputGuards, InputSpec
from fxopt_capture.export.compare import difference
from fxopt_rewrite.dtypes import dtype_kind

_DTYPES = (torch.bool, torch.int64, torch.float32)


def take_other_masks(model: nn.Module, form: CallForm, captured: GraphModule, inputs: Mapping[str, object]) -> None:
    """Let a captured module take masks of zeros and ones of each kind of dtype for which it is as the model.

    The inputs with "mask" in their names are tried one after the other, with a zero in each row.
    """
    for index, spec in enumerate(_guards(captured).specs):
        value = inputs.get(spec.name)
        if "mask" in spec.name and isinstance(value, torch.Tensor) and value.dim() and _is_mask(value):
            mask = value.clone()
            mask[..., -1:] = 0
            for dtype in _DTYPES:
                if dtype_kind(dtype) != spec.kind:
                    _try(model, form, captured, {**inputs, spec.name: mask.to(dtype)}, index, dtype_kind(dtype))


def _is_mask(value: torch.Tensor) -> bool:
    return bool(((value == 0) | (value == 1)).all())


def _guards(captured: GraphModule) -> InputGuards:
    guards = captured._modules[GUARDS]
    assert isinstance(guards, InputGuards)
    return guards


def _try(
    model: nn.Module, form: CallForm, captured: GraphModule, inputs: Mapping[str, object], index: int, kind: str
) -> None:
    """Let one input be of one more kind, unless model and graph differ with it, or one of them does not take it."""
    guards = _guards(captured)
    specs = [_with(spec, kind) if place == index else spec for place, spec in enumerate(guards.specs)]
    wider = InputGuards(specs, guards.conditions, guards.mode, guards.module_dtype, guards.baked)
    wider.training, captured._modules[GUARDS] = guards.training, wider
    try:
        with redirect_stderr(io.StringIO()):  # where graph modules print the line at which they fail
            is_right = difference(model, form, captured, inputs, form.fixed) is None
    except Exception:  # whatever model or graph raise
        is_right = False
    if not is_right:
        captured._modules[GUARDS] = guards


def _with(spec: InputSpec, kind: str) -> InputSpec:
    return replace(spec, also=(*spec.also, kind))
