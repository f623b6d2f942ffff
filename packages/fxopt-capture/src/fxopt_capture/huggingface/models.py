"""Knowledge about the models of the transformers library, which is imported only if a model comes from it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from fxopt_capture.call.arguments import CallForm
from fxopt_capture.call.caches import is_cache, register_cache_types
from fxopt_capture.exporting.strategy import Preparation
from fxopt_capture.huggingface.configurations import configurations, configurations_kept

#: Inputs of floating-point numbers whose second dimension is the sequence.
_SEQUENCE = frozenset({"inputs_embeds", "decoder_inputs_embeds", "encoder_hidden_states", "encoder_outputs"})
_SOUNDS = frozenset({"input_values", "input_features", "audio_values"})
_MOST_CHANNELS = 2  # mono and stereo: a sound of more is frames of features
#: This implementation gathers the weights of the chosen experts; the eager one loops over experts that values choose.
_EXPORTABLE_EXPERTS = "batched_mm"
_EAGER = "eager"


def is_pretrained(model: nn.Module) -> bool:
    """Return whether `model` is a ``transformers.PreTrainedModel``, without importing transformers."""
    utilities = sys.modules.get("transformers.modeling_utils")
    return utilities is not None and isinstance(model, utilities.PreTrainedModel)


def pretrained_models(model: nn.Module) -> list[nn.Module]:
    """Return the outermost models of transformers in a module, or the module itself if it is one."""
    if is_pretrained(model):
        return [model]
    return [found for child in model.children() for found in pretrained_models(child)]


def cache_choice(model: nn.Module, form: CallForm) -> dict[str, object]:
    """Return ``use_cache`` from the model's configuration, if the model has this argument and was not given it.

    If the configuration says no and a nested one says yes, the model is left to decide which of them it reads.
    """
    default = getattr(getattr(model, "config", None), "use_cache", None)
    if default is None or not _may_choose(form):
        return {}
    asked = [config for config in configurations(model) if hasattr(config, "model_type")]  # not those of generation
    parts = any(getattr(config, "use_cache", None) for config in asked)
    return {} if parts and not default else {"use_cache": bool(default)}


def no_cache(form: CallForm, inputs: Mapping[str, object]) -> dict[str, object]:
    """Return ``use_cache=False`` if a model has this argument and was given no cache."""
    return {} if not _may_choose(form) or any(map(is_cache, inputs.values())) else {"use_cache": False}


def _may_choose(form: CallForm) -> bool:
    """Return whether a model takes ``use_cache``, and was not given it."""
    return "use_cache" not in form.fixed and any(parameter.name == "use_cache" for parameter in form.parameters)


def dynamic_dimensions(
    name: str, tensor: torch.Tensor, caches: Collection[str] = (), *, sounds: bool = False
) -> Sequence[int]:
    """Return the dimensions of an input that are dynamic: batch, for text the sequence, of `sounds` whatever can vary.

    The sequence is the second dimension of token ids, masks over them and embeddings, or the third after choices, and
    the third of the keys and values of `caches`; a four-dimensional mask is over queries and keys. A sound is samples,
    channels of them, or frames of features: torch leaves static what the model fixes. The sizes of images stay static.
    """
    if tensor.dim() == 0:
        return ()
    if name in caches and tensor.dim() == 4:
        return (0, 2)
    if sounds and is_sound(name, tensor):
        return [dim for dim, size in enumerate(tensor.shape) if dim == 0 or size > _MOST_CHANNELS]
    is_text = not tensor.dtype.is_floating_point or name in _SEQUENCE
    if "mask" in name and "pixel" not in name and tensor.dim() == 4:
        return (0, 2, 3)
    if tensor.dim() > 1 and "pixel" not in name and (is_text or "attention_mask" in name):
        # Ids for multiple choice are (batch, choices, tokens), and `bbox` is (batch, tokens, 4 coordinates).
        return (0, 1, 2) if tensor.dim() == 3 and name != "bbox" and not tensor.is_floating_point() else (0, 1)
    return (0,)


def is_sound(name: str, tensor: object) -> bool:
    """Return whether an input is samples or features of sounds, by its name and rank."""
    return name in _SOUNDS and isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dim() < 4


def dynamic_dimensions_around(
    name: str, tensor: torch.Tensor, caches: Collection[str] = (), *, sounds: bool = False
) -> Sequence[int]:
    """Return the dimensions that may be dynamic of an input of a module that contains a Hugging Face model.

    The names of its arguments say nothing, so the second dimension counts as a length wherever it may be one. torch
    leaves a dimension static if the model needs it to be.
    """
    found = dynamic_dimensions(name, tensor, caches, sounds=sounds)
    return (0, 1) if tuple(found) == (0,) and tensor.dim() in (2, 3) else found


def preparations(model: nn.Module) -> list[Preparation]:
    """Return contexts to export a model in: a light one, one with transformers' patches, one with eager attention."""
    found = [Preparation(partial(_prepared, model, patched=patched)) for patched in (False, True)]
    chosen = {getattr(config, "_attn_implementation", None) for config in configurations(model)} - {None, _EAGER}
    if chosen:
        note = (
            f"the graph has attention as single operators (attn_implementation={_EAGER!r}), as the model cannot be "
            f"captured with {' and '.join(sorted(map(repr, chosen)))}"
        )
        found.append(Preparation(partial(_prepared, model, patched=True, eager=True), note))
    return found


@contextmanager
def _prepared(model: nn.Module, *, patched: bool, eager: bool = False) -> Iterator[None]:
    """Set up what an export of the model needs, and undo it at the end."""
    with ExitStack() as stack:
        stack.enter_context(configurations_kept(model))
        stack.enter_context(_plain_masks())
        for config in configurations(model):
            if getattr(config, "_experts_implementation", None) is not None:
                config._experts_implementation = _EXPORTABLE_EXPERTS
            if eager:
                config._attn_implementation = _EAGER
        if patched:
            from transformers.exporters import exporter_dynamo
            from transformers.exporters.utils import apply_patches

            register_cache_types()
            pretrained: Any  # transformers wants its own class
            for pretrained in pretrained_models(model):
                exporter_dynamo.register_cache_pytrees_for_model(pretrained)
            stack.enter_context(apply_patches("dynamo"))
            stack.enter_context(exporter_dynamo.reset_model_state(model))
            stack.enter_context(_normed_projections(model))
        yield


@contextmanager
def _plain_masks() -> Iterator[None]:
    """Let transformers compute masks of several conditions by broadcasting, as in its own exports, and not by vmap.

    Passes and other runtimes can read such a graph. Releases before 5.23 do not offer it.
    """
    masks = sys.modules.get("transformers.masking_utils")
    exporters: Any = find_spec("transformers.exporters") and import_module("transformers.exporters.utils")
    expansion = getattr(exporters, "_patch_broadcast_mask_expansion", None)
    if masks is None or expansion is None:
        yield
        return
    patches = [(masks, "_vmap_expansion_sdpa", expansion), (masks, "TransformGetItemToIndex", lambda _: nullcontext)]
    with exporters.patch_attributes(patches):
        yield


@contextmanager
def _normed_projections(model: nn.Module) -> Iterator[None]:
    """Normalise queries and keys of the image attention that transformers replaces for the export.

    The replacement calls ``qkv``, and normalises only the results of three separate projections.
    """
    hooks = [
        module.get_submodule("qkv").register_forward_hook(partial(_normed, module))
        for module in model.modules()
        if {"qkv", "q_norm", "k_norm"} <= module._modules.keys()
        and "_patch_chunked_vision_attention" in type(module).forward.__qualname__
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _normed(layer: Any, project: nn.Module, args: object, projected: torch.Tensor) -> torch.Tensor:
    """Return queries, keys and values side by side, with queries and keys normalised per head."""
    # With grouped heads, a layer has `kv_dim`: keys and values are narrower than queries.
    width = getattr(layer, "kv_dim", None) or projected.shape[-1] // 3
    parts = torch.split(projected, [projected.shape[-1] - 2 * width, width, width], dim=-1)
    queries, keys = (part.view(*part.shape[:-1], -1, layer.head_dim) for part in parts[:2])
    return torch.cat([layer.q_norm(queries).flatten(-2), layer.k_norm(keys).flatten(-2), parts[2]], dim=-1)
