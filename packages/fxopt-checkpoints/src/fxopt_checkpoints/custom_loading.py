"""Modules that load their part of a checkpoint themselves: by hooks, own methods, extra state, or unusual tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy

from fxopt_checkpoints._torch import plain_loaders
from fxopt_checkpoints.sharding import is_sharded
from fxopt_core import Snapshot


def has_custom_loading(module: nn.Module) -> bool:
    """Return whether loading a module is more than copying its tensors one by one in this process."""
    hooked = bool(module._load_state_dict_pre_hooks)
    return hooked or _loads_itself(module) or any(map(is_sharded, _own_tensors(module)))


def _loads_itself(module: nn.Module) -> bool:
    """Return whether a module has its own code for copying, or tensors that are copied by other rules."""
    cls = type(module)
    custom = "_load_from_state_dict" in vars(module) or cls._load_from_state_dict not in plain_loaders
    custom = custom or cls.get_extra_state is not nn.Module.get_extra_state
    return custom or any(is_unusual(tensor) and not is_sharded(tensor) for tensor in _own_tensors(module))


def is_unusual(tensor: Tensor) -> bool:
    """Return whether copying into a tensor may not be simple: it is lazy, of a subclass, sparse or quantized."""
    plain = type(tensor) in (Tensor, nn.Parameter)
    return is_lazy(tensor) or not plain or tensor.layout != torch.strided or tensor.is_quantized


def _has_extra_state(module: nn.Module) -> bool:
    cls, base = type(module), nn.Module
    return cls.get_extra_state is not base.get_extra_state and cls.set_extra_state is not base.set_extra_state


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]


class CustomLoading:
    """Lets such modules load, runs the hooks of others, collects their complaints, and can roll everything back."""

    def __init__(self, graph_module: GraphModule) -> None:
        self._graph_module = graph_module
        named = dict(graph_module.named_modules(remove_duplicate=False))
        self._names = set(named)
        self._modules = {name: module for name, module in named.items() if _loads_itself(module)}
        self._taking_part = {
            name: module for name, module in named.items() if name in self._modules or module._load_state_dict_pre_hooks
        }
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.problems: list[str] = []
        self._before: Snapshot | None = None
        self._extra: list[tuple[nn.Module, Any]] = []

    def owns(self, key: str) -> bool:
        """Return whether the innermost module on the path of a key is one of these."""
        owner = key.rpartition(".")[0]
        while owner not in self._names:
            owner = owner.rpartition(".")[0]
        return owner in self._modules

    def load(self, state_dict: dict[str, Any], metadata: Mapping[str, Any] | None, assign: bool) -> None:
        """Let them load; as in torch, hooks may change ``state_dict``."""
        if self._taking_part:
            own = (tensor for module in self._taking_part.values() for tensor in _own_tensors(module))
            tensors = [tensor for tensor in own if not is_sharded(tensor)]  # no hook writes values of sharded ones
            self._before = Snapshot(self._graph_module, protect_values=tensors)
        stateful = filter(_has_extra_state, self._modules.values())
        self._extra = [(each, copy.deepcopy(each.get_extra_state())) for each in stateful]
        for name, module in self._taking_part.items():
            local = dict((metadata or {}).get(name, {}))
            if assign:
                local["assign_to_params_buffers"] = True
            prefix = f"{name}." if name else ""
            given = state_dict, prefix, local, True, self.missing, self.unexpected, self.problems
            hooks = [*module._load_state_dict_pre_hooks.values()]
            try:
                for load in [module._load_from_state_dict] if name in self._modules else hooks:  # which runs hooks, too
                    load(*given)
            except Exception as error:  # whatever a module's own code raises
                self.problems.append(f"module `{name}` cannot load its part ({type(error).__name__}: {error})")

    def roll_back(self) -> None:
        """Restore the former values and states."""
        if self._before is not None:
            self._before.restore()
        for module, state in self._extra:
            module.set_extra_state(state)
