"""Buffers that no checkpoint has, of Hugging Face models on the meta device: computed as transformers does on loading.

``from_pretrained`` makes every model on the meta device, too. Buffers that are not saved, such as the frequencies of
rotary embeddings, get their values from the model's own ``_init_weights`` then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fxopt_capture.graph.shells import clone_module

_GARBAGE = (0, 1)  # what buffers hold before: those with the same values after both were computed, and wholly


def computed_buffers(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return the values of buffers that are not saved and hold nothing, by name, as far as the model can compute them.

    Nothing is written into the model.
    """
    found: dict[str, Tensor] = {}
    for name, module, owner in _modules(model):
        hollow = [key for key in module._non_persistent_buffers_set if _is_hollow(module._buffers.get(key))]
        first, second = (_computed(owner, module, garbage) if hollow else {} for garbage in _GARBAGE)
        for key in hollow:
            if key in first and key in second and torch.equal(first[key], second[key]):
                found[f"{name}.{key}".lstrip(".")] = first[key].to(device)
    return found


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield name, module and the innermost pretrained model that it is part of, which initialises it."""
    pretrained = sys.modules["transformers.modeling_utils"].PreTrainedModel
    owners = {"": model}
    for name, module in model.named_modules():
        owner = module if isinstance(module, pretrained) else owners[name.rpartition(".")[0]]
        owners[name] = owner
        yield name, module, owner


def _computed(owner: Any, module: nn.Module, garbage: int) -> dict[str, Tensor]:
    """Return the buffers of a module after a copy without parameters was initialised; none where that fails."""
    copied = _hollow_copy(module)
    for key, buffer in module._buffers.items():
        if buffer is not None:
            copied._buffers[key] = torch.full(buffer.shape, garbage, dtype=buffer.dtype, device="cpu")
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            owner._init_weights(copied)
    except Exception:  # whatever a model's own code raises where there are no weights
        return {}
    return {key: buffer for key, buffer in copied._buffers.items() if buffer is not None}


def _hollow_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module, and of those in it, with tensors on the meta device alone."""
    copied = clone_module(module)
    for kind in ("_parameters", "_buffers"):
        mapping: dict[str, Any] = vars(copied)[kind]
        for key, tensor in mapping.items():
            if tensor is not None:
                hollow = torch.empty_like(tensor, device="meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                mapping[key] = nn.Parameter(hollow, requires_grad=False) if is_parameter else hollow
    for key, child in copied._modules.items():
        copied._modules[key] = None if child is None else _hollow_copy(child)
    return copied


def _is_hollow(buffer: Tensor | None) -> bool:
    return buffer is not None and buffer.is_meta
