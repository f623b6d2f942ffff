"""Inputs of text models that a call may leave out, and the values that the model was seen to use instead."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fxopt_capture.call.arguments import IDS, CallForm
from fxopt_capture.exporting.compare import is_same_call

_NUMBERS = {"attention_mask": 1, "token_type_ids": 0}


def absent_inputs(model: nn.Module, form: CallForm, inputs: Mapping[str, object]) -> dict[str, int]:
    """Return the inputs that a call may leave out, each with the number that the model then uses for all tokens.

    Models disagree: GPT-2 adds nothing for absent token types, and others derive the mask from the padding. So the
    model is called both ways, with a padding token among those of the example.
    """
    ids = inputs.get(IDS)
    config = getattr(model, "config", None)
    if not isinstance(ids, torch.Tensor) or ids.numel() == 0 or config is None:
        return {}
    padding = getattr(config, "pad_token_id", None)
    if isinstance(padding, int):
        ids = ids.clone()
        ids[..., -1:] = padding
    found = {}
    for name, number in _NUMBERS.items():
        given = inputs.get(name)
        if isinstance(given, torch.Tensor) and given.shape == ids.shape and given.dtype is torch.int64:
            filled = {**inputs, IDS: ids, name: torch.full_like(given, number)}
            if is_same_call(model, form, filled, {key: value for key, value in filled.items() if key != name}):
                found[name] = number
    return found
