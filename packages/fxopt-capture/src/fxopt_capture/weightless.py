"""Models on the meta device, whose tensors hold nothing: what stands in for these while they are captured.

A graph has devices in it: that of the positions it counts, of the masks it makes. So such a model is exported as if its
tensors were where its inputs are, and on the CPU where these are on the meta device too. While `torch.export` looks at
them, they are tensors of the right shape and strides on that device, without memory behind them. Where model and graph
are run and compared, they are random numbers whose rows overlap in memory; a kernel may copy the one that it reads.
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

from fxopt_capture.graph.shells import registered

_KINDS = ("_parameters", "_buffers")
_LARGEST = 1 << 29  # elements of a tensor; 2 GiB in float32


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
def off_meta() -> Iterator[None]:
    """Let the code of a model make tensors with values, where the caller has made meta the default device."""
    if torch.get_default_device().type == "meta":
        with torch.device("cpu"):
            yield
    else:
        yield


@contextmanager
def hollow(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Let the tensors of a model that are on the meta device be on another one for a while, without memory there.

    So it is with buffers that were made in inference mode, which ``torch.export`` does not take.
    """
    stand_ins: dict[int, Tensor] = {}
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        for kind in _KINDS:
            mapping: dict[str, Any] = vars(module)[kind]
            places += [(mapping, name, tensor) for name, tensor in mapping.items() if _needs_stand_in(tensor)]
    try:
        for mapping, name, tensor in places:
            if id(tensor) not in stand_ins:
                stand_ins[id(tensor)] = _without_memory(tensor, device if tensor.is_meta else tensor.device)
            mapping[name] = stand_ins[id(tensor)]
        yield
    finally:
        for mapping, name, tensor in places:
            mapping[name] = tensor


def _without_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the same kind that must not be read; its memory is given back before it is touched."""
    with torch.inference_mode(False):
        try:
            made = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=device)
            made.untyped_storage().resize_(0)
        except RuntimeError:  # not even the addresses are free; strides are less than that
            made = torch.empty((), dtype=tensor.dtype, device=device).expand(tensor.shape)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def put_back(exported: nn.Module, model: nn.Module) -> None:
    """Give an exported module the model's own tensors in place of those that stood in for them."""
    for owner_name, owner in exported.named_modules(remove_duplicate=False):
        for kind in _KINDS:
            mapping: dict[str, Any] = vars(owner)[kind]
            for name in mapping:
                tensor = registered(model, f"{owner_name}.{name}".lstrip("."))
                if _needs_stand_in(tensor):
                    mapping[name] = tensor


def is_too_large(model: nn.Module) -> bool:
    """Return whether a tensor on the meta device is too large to have one like it for `random_weights`."""
    tensors = (*model.parameters(), *model.buffers())
    return any(tensor.numel() > _LARGEST for tensor in tensors if _is_hollow(tensor))


def random_weights(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return values for all tensors of a model that are on the meta device, by name, in next to no memory."""
    generator = torch.Generator().manual_seed(0)
    made: dict[int, Tensor] = {}
    found = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, tensor in (*parameters.items(), *buffers.items()):
        if _is_hollow(tensor):
            if id(tensor) not in made:
                positive = name in buffers or tensor.dim() < 2
                made[id(tensor)] = _random(tensor, generator, device, positive=positive)
            found[name] = made[id(tensor)]
    return found


def _random(tensor: Tensor, generator: torch.Generator, device: torch.device, *, positive: bool) -> Tensor:
    """Return values of the shape of a tensor, such that products with them are about as large as before."""
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if not dtype.is_floating_point:
        return torch.zeros((), dtype=dtype, device=device).expand(shape)
    numbers = torch.rand(sum(shape) + 1, generator=generator, device="cpu")
    inputs = max(math.prod(shape[1:]), 1)
    numbers = numbers + 0.5 if positive else (numbers - 0.5) * 3.4 * 2.0 ** round(-math.log2(inputs) / 2)
    # Each row is the one before, shifted by one: no two are alike, and a matrix takes the memory of a row and a column.
    return numbers.to(device, dtype).as_strided(shape, (1,) * len(shape))


def _is_hollow(tensor: Tensor | None) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter)
    return tensor is not None and plain and tensor.is_meta and not is_lazy(tensor)


def _needs_stand_in(tensor: Tensor | None) -> bool:
    return _is_hollow(tensor) or (type(tensor) is Tensor and tensor.is_inference())
