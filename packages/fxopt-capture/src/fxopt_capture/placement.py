"""Where the tensors of a checkpoint go in a rewritten module, and on which device and in which dtype they are then."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxopt_core.checkpoints import current_tensors
from fxopt_core.errors import CheckpointError
from fxopt_core.graph import iter_nodes
from fxopt_core.key_tracing import key_map


class Placement:
    """The tensors of a module, and what they are to be.

    Args:
        graph_module: the rewritten module.
        device: where all is to be; None where tensors stay.
        dtype: what floating-point tensors are to be; None where they stay what they are.

    Attributes:
        names: its key map.
        current: all of its tensors by name.
        wanted: for each of them one on the meta device with the dtype that it is to have, or one on its device.
        loaded: the names of those that a checkpoint fills, tied ones included.
        others: the names of those that it does not, and that are to have another device or dtype.

    Raises:
        CheckpointError: The device cannot be used, or the graph is for another one.
        FxoptError: See `key_map`.
    """

    def __init__(self, graph_module: GraphModule, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        if dtype is not None and not getattr(dtype, "is_floating_point", False):
            raise CheckpointError(f"dtype is {dtype!r}, expected a floating-point dtype such as torch.bfloat16")
        self.graph_module, self.dtype = graph_module, dtype
        self._device = None if device is None else _usable(device)
        if self._device is not None:
            _check_devices(graph_module, self._device)
        self._for_meta = self._device or _captured_device(graph_module)
        self.names = key_map(graph_module)
        self.current = current_tensors(graph_module)
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in graph_module.modules():
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self._owners.setdefault(id(tensor), []).append((module, key))
        kept = {row.key for row in self.names.originals if row.kept and row.in_state_dict}
        filled = kept | {target.key for target in self.names.new_tensors}
        ids = {id(self.current[key]) for key in filled if key in self.current}
        self.loaded = {key for key, tensor in self.current.items() if id(tensor) in ids}
        self.wanted = {key: self._stand_in(key) for key in self.current}
        self.others = [key for key in self.current if key not in self.loaded and self._moves(key)]

    def device_of(self, key: str) -> torch.device:
        """Return where a tensor is to be."""
        now = self.current[key].device
        return self._device or (self._for_meta if now.type == "meta" else now)

    def dtype_of(self, key: str) -> torch.dtype:
        """Return the dtype that a tensor is to have."""
        now = self.current[key].dtype
        return self.dtype if self.dtype is not None and now.is_floating_point else now

    def _stand_in(self, key: str) -> Tensor:
        """Return a tensor with the device and dtype to come, and next to no memory."""
        return torch.empty((), device=self.device_of(key), dtype=self.dtype_of(key))

    def _moves(self, key: str) -> bool:
        tensor = self.current[key]
        return not tensor.is_meta and (tensor.device, tensor.dtype) != (self.device_of(key), self.dtype_of(key))

    def owners(self, tensor: Tensor) -> list[tuple[nn.Module, str]]:
        """Return the modules that hold a tensor, each with its name there."""
        return self._owners[id(tensor)]

    def target(self, key: str, *, complete: bool, covered: int = 0) -> Tensor:
        """Return what the values of a tensor are written into: itself, or a new one.

        Args:
            key: its name.
            complete: whether all values that it has are going to be written.
            covered: how many elements these are; a pass may have padded it.
        """
        former, device, dtype = self.current[key], self.device_of(key), self.dtype_of(key)
        writable = not former.is_inference() or torch.is_inference_mode_enabled()
        if (former.device, former.dtype) == (device, dtype) and writable:
            return former
        if complete:
            make = torch.empty_like if covered >= former.numel() else torch.zeros_like
            return make(former.detach(), device=device, dtype=dtype)
        return former.detach().to(device, dtype, copy=True)


def _usable(device: torch.device | str) -> torch.device:
    """Return a device as tensors on it name it."""
    try:
        found = torch.empty(0, device=device).device
    except Exception as error:  # a name that torch does not know, or a device that is not here
        raise CheckpointError(f"device {str(device)!r} cannot be used: {error}") from error
    if found.type == "meta":
        raise CheckpointError("device is 'meta', where nothing can be loaded")
    return found


def _captured_device(graph_module: GraphModule) -> torch.device:
    """Return the device that a graph was captured for, as far as that is known: that of its inputs."""
    nodes = (node for node in iter_nodes(graph_module.graph) if node.op == "placeholder")
    values = [value.device for node in nodes if isinstance(value := node.meta.get("val"), Tensor)]
    tensors = [tensor.device for tensor in current_tensors(graph_module).values()]
    return next((device for device in (*values, *tensors) if device.type != "meta"), torch.device("cpu"))


def _check_devices(graph_module: GraphModule, device: torch.device) -> None:
    """Refuse a device other than that on which the graph makes tensors itself."""
    for node in iter_nodes(graph_module.graph):
        for found in _devices(node):
            if found.type not in (device.type, "meta"):
                raise CheckpointError(
                    f"node `{node.name}` makes a tensor on {found}, and the model would be on {device}: capture the "
                    f"model with inputs on {device}"
                )


def _devices(node: Node) -> Iterator[torch.device]:
    return (leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, torch.device))
