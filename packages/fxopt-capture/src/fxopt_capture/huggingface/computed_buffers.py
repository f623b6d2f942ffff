"""Computing the buffers that no checkpoint has, for Hugging Face models on the meta device.

``from_pretrained`` makes every model on the meta device, too; buffers that are not saved, such as the frequencies of
rotary embeddings, then get their values from the model's own ``initialize_weights``.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

_GARBAGE = (0, 1)  # initial contents: buffers that end with the same values after both were fully computed


def computed_buffers(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return the values of unsaved meta buffers by name, as far as the model computes them, without changing it."""
    first, second = (_initialized(model, garbage) for garbage in _GARBAGE)
    same = (name for name in first if name in second and torch.equal(first[name], second[name]))
    return {name: first[name].to(device) for name in same}


def _initialized(model: nn.Module, garbage: int) -> dict[str, Tensor]:
    """Return such buffers of a copy without weights after initialization; none if it fails."""
    on_meta = {id(tensor): tensor.detach().to("meta") for tensor in (*model.parameters(), *model.buffers())}
    # The memo has a meta tensor in place of each tensor, so that no weights are copied.
    copied = copy.deepcopy(model, on_meta)
    found = {}
    for name, module in copied.named_modules():
        # transformers does not initialize modules that have this mark.
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
