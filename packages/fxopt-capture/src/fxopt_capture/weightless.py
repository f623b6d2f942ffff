"""Stand-ins for the tensors of models on the meta device, while the models are captured.

A graph contains devices, for example of the positions and masks that it makes. So such a model is exported as if its
tensors were on the device of its inputs, or on the CPU if these are on the meta device too. For `torch.export`, the
stand-ins have the right shape and strides on that device, but no memory. Model and graph cannot be run and compared:
the graph refuses sizes of 0 and 1 where an export alone does not show that it is right for them, and other images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from fxopt_capture.graph.shells import registered

_KINDS = ("_parameters", "_buffers")


def is_weightless(model: nn.Module) -> bool:
    """Return whether a parameter or buffer of a model is on the meta device.

    >>> is_weightless(nn.Linear(2, 2, device="meta")), is_weightless(nn.Linear(2, 2))
    (True, False)
    """
    return any(map(_on_meta, (*model.parameters(), *model.buffers())))


def device_for(model: nn.Module, inputs: Mapping[str, object]) -> torch.device:
    """Return the device to capture a model without weights for: the first of inputs and tensors not on meta, or CPU."""
    tensors = [leaf for leaf in pytree.tree_leaves(dict(inputs)) if isinstance(leaf, Tensor)]
    tensors += [*model.parameters(), *model.buffers()]
    return next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))


def with_values(inputs: Mapping[str, object], device: torch.device) -> dict[str, object]:
    """Return inputs with ones for those on the meta device."""

    def valued(tensor: Tensor) -> Tensor:
        return torch.ones_like(tensor, device=device, requires_grad=tensor.requires_grad) if tensor.is_meta else tensor

    found: dict[str, object] = pytree.tree_map_only(Tensor, valued, dict(inputs))
    return found


@contextmanager
def stand_ins(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Replace the meta tensors of a model, in the ``with`` block, by tensors without memory on another device.

    Buffers made in inference mode, which ``torch.export`` does not take, are replaced as well.
    """
    made: dict[int, Tensor] = {}
    mappings: list[dict[str, Any]] = [vars(module)[kind] for module in model.modules() for kind in _KINDS]
    places = [(mapping, *item) for mapping in mappings for item in mapping.items() if _needs_stand_in(item[1])]
    try:
        for mapping, name, tensor in places:
            if id(tensor) not in made:
                made[id(tensor)] = _without_memory(tensor, device if tensor.is_meta else tensor.device)
            mapping[name] = made[id(tensor)]
        yield
    finally:
        for mapping, name, tensor in places:
            mapping[name] = tensor


def _without_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the same kind that must not be read; its memory is freed before it is touched."""
    with torch.inference_mode(False):
        try:
            made = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=device)
            made.untyped_storage().resize_(0)
        except RuntimeError:  # the address space does not suffice; the strides matter less
            made = torch.empty((), dtype=tensor.dtype, device=device).expand(tensor.shape)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def restore_tensors(exported: nn.Module, model: nn.Module) -> None:
    """Give an exported module the model's own tensors in place of their stand-ins."""
    for owner_name, owner in exported.named_modules(remove_duplicate=False):
        for kind in _KINDS:
            mapping: dict[str, Any] = vars(owner)[kind]
            for name in mapping:
                tensor = registered(model, f"{owner_name}.{name}".lstrip("."))
                if _needs_stand_in(tensor):
                    mapping[name] = tensor


def _on_meta(tensor: Tensor | None) -> bool:
    return tensor is not None and type(tensor) in (Tensor, nn.Parameter) and tensor.is_meta and not is_lazy(tensor)


def _needs_stand_in(tensor: Tensor | None) -> bool:
    return _on_meta(tensor) or (type(tensor) is Tensor and tensor.is_inference())
