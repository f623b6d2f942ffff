"""Models on the meta device, whose tensors hold nothing: what stands in for these while they are captured.

A graph has devices in it: that of the positions it counts, of the masks it makes. So such a model is exported as if its
tensors were where its inputs are, and on the CPU where these are on the meta device too. While `torch.export` looks at
them, they are tensors of the right shape and strides on that device, without memory behind them. Where model and graph
are run and compared, they are windows on a few random numbers, so that neither takes memory for weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

_KINDS = ("_parameters", "_buffers")
_STEPS = (1, 7, 3, 5, 11, 13)  # between neighbours in each dimension of a window


def is_weightless(model: nn.Module) -> bool:
    """Return whether a parameter or buffer of a model is on the meta device.

    >>> is_weightless(nn.Linear(2, 2, device="meta")), is_weightless(nn.Linear(2, 2))
    (True, False)
    """
    return any(_is_hollow(tensor) for tensor in (*model.parameters(), *model.buffers()))


def device_for(model: nn.Module, inputs: Mapping[str, object]) -> torch.device:
    """Return the device that a model without weights is captured for: that of its inputs, or of what is not on meta."""
    tensors = [leaf for leaf in pytree.tree_leaves(dict(inputs)) if isinstance(leaf, Tensor)]
    tensors += [*model.parameters(), *model.buffers()]
    return next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))


def with_values(inputs: Mapping[str, object], device: torch.device) -> dict[str, object]:
    """Return inputs with values in place of those on the meta device: random numbers, or ones for other than floats."""
    generator = torch.Generator().manual_seed(0)

    def valued(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if not tensor.is_floating_point():
            return torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
        values = torch.randn(tensor.shape, generator=generator, device="cpu")
        return values.to(device, tensor.dtype).requires_grad_(tensor.requires_grad)

    found: dict[str, object] = pytree.tree_map_only(Tensor, valued, dict(inputs))
    return found


@contextmanager
def hollow(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Let the tensors of a model that are on the meta device be on another one for a while, without memory there."""
    stand_ins: dict[int, Tensor] = {}
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        for kind in _KINDS:
            mapping: dict[str, Any] = vars(module)[kind]
            places += [(mapping, name, tensor) for name, tensor in mapping.items() if _is_hollow(tensor)]
    try:
        for mapping, name, tensor in places:
            if id(tensor) not in stand_ins:
                stand_ins[id(tensor)] = _without_memory(tensor, device)
            mapping[name] = stand_ins[id(tensor)]
        yield
    finally:
        for mapping, name, tensor in places:
            mapping[name] = tensor


def _without_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the same kind that must not be read; its memory is given back before it is touched."""
    size, stride = tuple(tensor.shape), tensor.stride()
    with torch.inference_mode(False):
        made = torch.empty_strided(size, stride, dtype=tensor.dtype, device=device)
    made.untyped_storage().resize_(0)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def put_back(exported: nn.Module, model: nn.Module) -> None:
    """Give an exported module the model's own tensors in place of those that stood in for them."""
    for owner_name, owner in exported.named_modules(remove_duplicate=False):
        for kind in _KINDS:
            mapping: dict[str, Any] = vars(owner)[kind]
            for name in mapping:
                tensor = _registered(model, f"{owner_name}.{name}".lstrip("."))
                if _is_hollow(tensor):
                    mapping[name] = tensor


def _registered(model: nn.Module, name: str) -> Tensor | None:
    path, _, key = name.rpartition(".")
    owner: Any = model
    for part in path.split(".") if path else ():
        owner = owner._modules.get(part)
        if owner is None:
            return None
    found: Tensor | None = owner._parameters.get(key)
    return owner._buffers.get(key) if found is None else found


def random_weights(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return values for all tensors of a model that are on the meta device, by name; they share a little memory."""
    pools = _Pools(device)
    made: dict[int, Tensor] = {}
    found = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, tensor in (*parameters.items(), *buffers.items()):
        if _is_hollow(tensor):
            if id(tensor) not in made:
                made[id(tensor)] = pools.window(tensor, positive=name in buffers or tensor.dim() < 2)
            found[name] = made[id(tensor)]
    return found


class _Pools:
    """Random numbers, as windows of any shape: neighbouring rows have the same numbers at other places."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pools: dict[tuple[torch.dtype, float, bool], Tensor] = {}

    def window(self, tensor: Tensor, *, positive: bool) -> Tensor:
        """Return values of the shape of a tensor, such that products with them are about as large as before."""
        shape, dtype = tuple(tensor.shape), tensor.dtype
        if not dtype.is_floating_point:
            return torch.zeros((), dtype=dtype, device=self._device).expand(shape)
        inputs = math.prod(shape[1:])
        scale = 1.0 if positive or inputs < 2 else 2.0 ** round(-math.log2(inputs) / 2)
        steps = (*_STEPS, *[17] * len(shape))[: len(shape)]
        extent = 1 + sum(max(size - 1, 0) * step for size, step in zip(shape, steps, strict=True))
        return self._pool(dtype, scale, positive, extent).as_strided(shape, steps)

    def _pool(self, dtype: torch.dtype, scale: float, positive: bool, extent: int) -> Tensor:
        key = (dtype, scale, positive)
        if key not in self._pools or self._pools[key].numel() < extent:
            generator = torch.Generator().manual_seed(0)
            values = torch.rand(extent, generator=generator, device="cpu")
            values = values + 0.5 if positive else (values - 0.5) * 3.4 * scale
            self._pools[key] = values.to(self._device, dtype)
        return self._pools[key]


def _is_hollow(tensor: Tensor | None) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter)
    return tensor is not None and plain and tensor.is_meta and not is_lazy(tensor)
