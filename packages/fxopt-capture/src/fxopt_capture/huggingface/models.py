"""What is known about the models of the transformers library; it is imported only where a model comes from it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fxopt_capture.call.arguments import CallForm
from fxopt_capture.call.caches import register_cache_types
from fxopt_capture.export.strategy import Preparation

_SEQUENCE = frozenset({"inputs_embeds", "decoder_inputs_embeds", "encoder_hidden_states", "encoder_outputs"})
_EXPORTABLE_EXPERTS = "batched_mm"


def is_pretrained(model: nn.Module) -> bool:
    """Whether `model` is a ``transformers.PreTrainedModel``; does not import transformers."""
    utilities = sys.modules.get("transformers.modeling_utils")
    return utilities is not None and isinstance(model, utilities.PreTrainedModel)


def cache_choice(model: nn.Module, form: CallForm) -> dict[str, object]:
    """Return ``use_cache`` as the model itself decides on it, where it has that argument and was not given it."""
    default = getattr(getattr(model, "config", None), "use_cache", None)
    is_open = default is not None and _takes_use_cache(form) and "use_cache" not in form.fixed
    return {"use_cache": bool(default)} if is_open else {}


def no_cache(form: CallForm) -> dict[str, object]:
    """Return ``use_cache=False`` where a model has that argument and was given no cache."""
    return {"use_cache": False} if _takes_use_cache(form) and "past_key_values" not in form.inputs else {}


def _takes_use_cache(form: CallForm) -> bool:
    return any(parameter.name == "use_cache" for parameter in form.parameters)


def dynamic_dimensions(name: str, tensor: torch.Tensor) -> Sequence[int]:
    """Return the dimensions of an input that are dynamic: batch, and for text the sequence.

    Token ids, masks over them and embeddings have the sequence second, or third behind the choices; a mask of rank four
    is over queries and keys, and cached keys and values have it third. The sizes of images and sounds stay static.
    """
    if tensor.dim() == 0:
        return ()
    if name == "past_key_values" and tensor.dim() == 4:
        return (0, 2)
    is_text = not tensor.dtype.is_floating_point or name in _SEQUENCE
    if "mask" in name and "pixel" not in name and tensor.dim() == 4:
        return (0, 2, 3)
    if tensor.dim() > 1 and "pixel" not in name and (is_text or "attention_mask" in name):
        return (0, 1, 2) if tensor.dim() == 3 and name != "bbox" and not tensor.is_floating_point() else (0, 1)
    return (0,)


def preparations(model: nn.Module) -> list[Preparation]:
    """Return the contexts to export a model in: a light one, then one with all that transformers ships."""
    return [partial(_prepared, model, patched=patched) for patched in (False, True)]


@contextmanager
def _prepared(model: nn.Module, *, patched: bool) -> Iterator[None]:
    """Set up what an export of the model needs, and take it back at the end."""
    with ExitStack() as stack:
        stack.enter_context(_exportable_experts(getattr(model, "config", None)))
        if patched:
            from transformers.exporters import exporter_dynamo
            from transformers.exporters.utils import apply_patches

            register_cache_types()
            exporter_dynamo.register_cache_pytrees_for_model(model)
            stack.enter_context(apply_patches("dynamo"))
            stack.enter_context(exporter_dynamo.reset_model_state(model))
        yield


@contextmanager
def _exportable_experts(config: Any) -> Iterator[None]:
    """Let mixture-of-experts layers multiply all experts at once, which a graph can say."""
    chosen = getattr(config, "_experts_implementation", None)
    if chosen is None or chosen == _EXPORTABLE_EXPERTS:
        yield
        return
    saved = dict(vars(config))
    config._experts_implementation = _EXPORTABLE_EXPERTS
    try:
        yield
    finally:
        vars(config).clear()
        vars(config).update(saved)
