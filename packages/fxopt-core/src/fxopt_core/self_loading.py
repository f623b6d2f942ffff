"""Modules that load their part of a checkpoint themselves: by hooks, an own method, extra state, or unusual tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

_PLAIN_LOADERS = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)


def loads_itself(module: nn.Module) -> bool:
    """Return whether copying tensors one by one is not what loading a module comes down to."""
    cls = type(module)
    own = "_load_from_state_dict" in vars(module) or cls._load_from_state_dict not in _PLAIN_LOADERS
    extra = cls.get_extra_state is not nn.Module.get_extra_state
    return own or extra or bool(module._load_state_dict_pre_hooks) or any(map(is_unusual, _own_tensors(module)))


def is_unusual(tensor: Tensor) -> bool:
    """Return whether copying into a tensor may not be simple: it is lazy, of a subclass, sparse or quantized."""
    plain = type(tensor) in (Tensor, nn.Parameter)
    return is_lazy(tensor) or not plain or tensor.layout != torch.strided or tensor.is_quantized


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]


@dataclass
class _Backup:
    """What a module held before it loaded."""

    module: nn.Module
    tensors: list[tuple[dict[str, Any], str, Any, Tensor | None]]
    extra: Any

    @staticmethod
    def of(module: nn.Module) -> _Backup:
        """Copy what a module holds of its own."""
        tensors: list[tuple[dict[str, Any], str, Any, Tensor | None]] = []
        for mapping in (module._parameters, module._buffers):
            for key, tensor in mapping.items():
                values = None if tensor is None or is_lazy(tensor) or tensor.is_meta else tensor.detach().clone()
                tensors.append((mapping, key, tensor, values))
        saves = type(module).get_extra_state is not nn.Module.get_extra_state
        return _Backup(module, tensors, copy.deepcopy(module.get_extra_state()) if saves else None)

    def restore(self) -> None:
        """Put it back."""
        with torch.no_grad():
            for mapping, key, tensor, values in self.tensors:
                mapping[key] = tensor
                if values is not None:
                    tensor.copy_(values)
        if type(self.module).set_extra_state is not nn.Module.set_extra_state:
            self.module.set_extra_state(self.extra)


@dataclass
class SelfLoading:
    """Lets such modules load, and takes it back where the whole is not loaded.

    Attributes:
        graph_module: the module that they are in.
        missing: keys that they lack.
        unexpected: keys that they do not know.
        problems: what they complain of.
    """

    graph_module: GraphModule
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _backups: list[_Backup] = field(default_factory=list)

    def __post_init__(self) -> None:
        named = self.graph_module.named_modules(remove_duplicate=False)
        self._modules = {name: module for name, module in named if loads_itself(module)}

    def owns(self, key: str) -> bool:
        """Return whether a key is for such a module: the innermost one on its path."""
        if not self._modules:
            return False
        module: nn.Module = self.graph_module
        parts = key.split(".")
        depth = 0
        while depth < len(parts) and isinstance(module._modules.get(parts[depth]), nn.Module):
            module = module.get_submodule(parts[depth])
            depth += 1
        return ".".join(parts[:depth]) in self._modules

    def load(self, state_dict: dict[str, Any], metadata: Mapping[str, Any] | None, assign: bool) -> None:
        """Let them load; as in torch, hooks may change ``state_dict``."""
        for name, module in self._modules.items():
            prefix = f"{name}." if name else ""
            local = dict((metadata or {}).get(name, {}))
            if assign:
                local["assign_to_params_buffers"] = True
            missing, unexpected = self.missing, self.unexpected
            self._backups.append(_Backup.of(module))
            try:
                module._load_from_state_dict(state_dict, prefix, local, True, missing, unexpected, self.problems)
            except Exception as error:  # whatever a module's own code raises
                self.problems.append(f"module `{name}` cannot load its part ({type(error).__name__}: {error})")

    def take_back(self) -> None:
        """Restore what they held before."""
        for backup in reversed(self._backups):
            backup.restore()
