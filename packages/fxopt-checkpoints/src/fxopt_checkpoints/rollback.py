"""Rolling back tensors that were overwritten or replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fxopt_checkpoints.sharding import is_sharded


class Rollback:
    """The contents of tensors and modules before each write.

    Args:
        keeps_values: whether values are copied into CPU memory before they are overwritten. Replaced tensors are
            restored in any case, and need no copy.

    >>> tensor = torch.zeros(2)
    >>> rollback = Rollback()
    >>> rollback.keep(tensor)
    >>> _ = tensor.fill_(1.0)
    >>> rollback.run()
    >>> tensor
    tensor([0., 0.])
    """

    def __init__(self, keeps_values: bool = True) -> None:
        self._keeps_values = keeps_values
        self._values: dict[int, tuple[Tensor, Tensor]] = {}
        self._places: list[tuple[dict[str, Any], str, Any]] = []
        self._new: set[int] = set()

    def keep(self, tensor: Tensor) -> None:
        """Keep the values, in this process, of a tensor that is about to be overwritten for the first time."""
        tensor = tensor.to_local() if is_sharded(tensor) else tensor
        # A tensor that replaced another one has no former values to keep.
        known = id(tensor) in self._values or id(tensor) in self._new
        if self._keeps_values and not known and not tensor.is_meta:
            self._values[id(tensor)] = tensor, tensor.detach().to("cpu", copy=True)

    def replace(self, owner: nn.Module, name: str, tensor: Tensor) -> None:
        """Replace a parameter or buffer by another tensor."""
        mapping: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
        self._places.append((mapping, name, mapping.get(name)))
        self._new.add(id(tensor))
        setattr(owner, name, tensor)

    def run(self) -> None:
        """Restore former tensors and values."""
        for mapping, name, former in reversed(self._places):
            mapping[name] = former
        with torch.no_grad():
            for tensor, values in reversed(self._values.values()):  # memory may be shared
                tensor.copy_(values)
