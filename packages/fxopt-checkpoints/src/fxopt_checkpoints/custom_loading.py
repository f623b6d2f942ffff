"""Modules that load their part of a checkpoint by code of their own, and tensors that are not copied as others are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxopt_checkpoints._torch import plain_loaders
from fxopt_checkpoints.sharding import is_sharded


def loads_itself(module: nn.Module) -> bool:
    """Return whether loading a module is more than copying its tensors: it has hooks, own methods or extra state."""
    cls = type(module)
    hooks: list[Any] = [*module._load_state_dict_pre_hooks.values()]
    # Those of FSDP2 only free what was gathered for a forward.
    own = any(not str(each.hook.__module__).startswith("torch.distributed.fsdp") for each in hooks)
    own = own or "_load_from_state_dict" in vars(module) or cls._load_from_state_dict not in plain_loaders
    own = own or cls.get_extra_state is not nn.Module.get_extra_state
    tensors = (tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None)
    return own or any(is_unusual(tensor) and not is_sharded(tensor) for tensor in tensors)


def is_unusual(tensor: Tensor) -> bool:
    """Return whether copying into a tensor may not be simple: it is lazy, of a subclass, sparse or quantized."""
    plain = type(tensor) in (Tensor, nn.Parameter)
    return is_lazy(tensor) or not plain or tensor.layout != torch.strided or tensor.is_quantized
