"""Copies of the tensors of a module tree that keep ties, shared memory, strides, flags, gradients and attributes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fxopt_core.errors import FxoptError
from fxopt_core.snapshot_tensors import over_storage, plain_storage


class TensorCopier:
    """Copies tensors one by one into `memo`, which maps the id of an original to its copy.

    `copy_value` copies whatever else hangs on a tensor as an attribute.
    """

    def __init__(self, memo: dict[int, Any], copy_value: Callable[[Any], Any]) -> None:
        self._memo = memo
        self._copy_value = copy_value
        self._views: Counter[int] = Counter()
        self._storages: dict[int, torch.UntypedStorage] = {}

    def copy_tree(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Copy all parameters, buffers and plain tensor attributes of these named modules."""
        tensors = {
            id(tensor): (name, tensor) for prefix, module in modules for name, tensor in _tensors(prefix, module)
        }
        storages = [_storage(tensor) for _, tensor in tensors.values()]
        self._views.update(storage._cdata for storage in storages if storage is not None)
        for name, tensor in tensors.values():
            self.copy(tensor, name)

    def copy(self, tensor: Tensor, name: str = "a tensor") -> Tensor:
        """Return the copy of one tensor, always the same one.

        Raises:
            FxoptError: the tensor is no leaf of autograd's graph.
        """
        known = self._memo.get(id(tensor))
        if isinstance(known, Tensor):
            return known
        if not tensor.is_leaf:
            raise FxoptError(
                f"{name} is the result of a computation that autograd recorded, and a copy of it would be cut off from "
                "that; detach it, or compute it in the graph"
            )
        twin = self._memo[id(tensor)] = self._twin(tensor)
        vars(twin).update({key: self._copy_value(value) for key, value in vars(tensor).items()})
        if tensor.grad is not None:
            twin.grad = self.copy(tensor.grad, f"{name}.grad")
        return twin

    def _twin(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage is None and not isinstance(tensor, FakeTensor):  # a deep copy of a fake one would look for its data
            twin: Tensor = copy.deepcopy(tensor, self._memo)
            return twin
        data = tensor.data.clone(memory_format=torch.preserve_format)
        if storage is not None and (self._views[storage._cdata] > 1 or data.stride() != tensor.stride()):
            data = over_storage(self._storage_copy(storage), tensor.data)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(data, tensor.requires_grad)
        return data.requires_grad_(tensor.requires_grad)

    def _storage_copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if storage._cdata not in self._storages:
            # torch has no type for `clone`
            self._storages[storage._cdata] = storage.clone()  # type: ignore[no-untyped-call]
        return self._storages[storage._cdata]


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory to copy, or None where only the tensor itself knows how."""
    storage = plain_storage(tensor)
    return None if storage is None or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() else storage


def _tensors(prefix: str, module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for group in (module._parameters, module._buffers, module.__dict__):
        for key, value in group.items():
            if isinstance(value, Tensor):
                yield f"{prefix}.{key}" if prefix else key, value
