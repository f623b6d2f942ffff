"""Buffers that no checkpoint has, of Hugging Face models on the meta device: computed as transformers does on loading.

``from_pretrained`` makes every model on the meta device, too. Buffers that are not saved, such as the frequencies of
rotary embeddings, get their values from the model's own ``initialize_weights`` then.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

_GARBAGE = (0, 1)  # what buffers hold before: those with the same values after both were computed, and wholly


def computed_buffers(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return the values of buffers that are not saved and hold nothing, by name, as far as the model can compute them.

    Nothing is written into the model.
    """
    first, second = (_initialized(model, garbage) for garbage in _GARBAGE)
    same = (name for name in first if name in second and torch.equal(first[name], second[name]))
    return {name: first[name].to(device) for name in same}


def _initialized(model: nn.Module, garbage: int) -> dict[str, Tensor]:
    """Return such buffers of a copy without weights after it was initialized; none where that fails."""
    on_meta = {id(tensor): tensor.detach().to("meta") for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, on_meta)
    found = {}
    for name, module in copied.named_modules():
        vars(module).pop("_is_hf_initialized", None)
        for key in module._non_persistent_buffers_set:
            buffer = model.get_submodule(name)._buffers.get(key)
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.full(buffer.shape, garbage, dtype=buffer.dtype, device="cpu")
                found[f"{name}.{key}".lstrip(".")] = module
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            copied.initialize_weights()  # type: ignore[operator]  # of transformers
    except Exception:  # whatever a model's own code raises where there are no weights
        return {}
    return {name: module._buffers[name.rpartition(".")[2]] for name, module in found.items()}
