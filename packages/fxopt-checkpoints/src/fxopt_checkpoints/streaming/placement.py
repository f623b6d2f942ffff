"""Where the tensors of a checkpoint go in a rewritten module, and the devices and dtypes that they get there."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxopt_checkpoints.load import current_tensors
from fxopt_checkpoints.rollback import Rollback
from fxopt_checkpoints.trace import key_map
from fxopt_core import iter_nodes
from fxopt_core.errors import CheckpointError


class Placement:
    """The tensors of a module, and their devices and dtypes after loading.

    Args:
        graph_module: the rewritten module.
        device: the device of all tensors; None if they stay where they are.
        dtype: the dtype of floating-point tensors; None if they keep theirs.

    Attributes:
        current: the tensors by name.
        wanted: for each tensor, one of a single element with the device and the dtype to come.
        loaded: the names of tensors that a checkpoint fills, including tied ones.

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
        self.names = key_map(graph_module)
        self.current = current_tensors(graph_module)
        filled = {row.key for row in self.names.originals if row.kept and row.in_state_dict}
        self.loaded = self._with_ties(filled | {target.name for target in self.names.new_tensors})
        for_meta = self._device or self._captured_device()
        self.wanted = {key: self._stand_in(tensor, for_meta) for key, tensor in self.current.items()}

    def _captured_device(self) -> torch.device:
        """Return the device that the graph was captured for: that of its inputs, or else of its tensors, or the CPU."""
        nodes = (node for node in iter_nodes(self.graph_module.graph) if node.op == "placeholder")
        values = [value for node in nodes if isinstance(value := node.meta.get("val"), Tensor)]
        devices = (tensor.device for tensor in (*values, *self.current.values()))
        return next((device for device in devices if device.type != "meta"), torch.device("cpu"))

    def _stand_in(self, tensor: Tensor, for_meta: torch.device) -> Tensor:
        """Return a tensor of a single element with the device and dtype to come."""
        dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty((), device=self._device or (for_meta if tensor.is_meta else tensor.device), dtype=dtype)

    def _with_ties(self, keys: set[str]) -> set[str]:
        ids = {id(self.current[key]) for key in keys & self.current.keys()}
        return {key for key, tensor in self.current.items() if id(tensor) in ids}

    def make_room(self, complete: set[str], rollback: Rollback) -> None:
        """Replace tensors whose device or dtype changes, and on the meta device those that get all of their values."""
        made: dict[int, Tensor] = {}
        room, writable = self._with_ties(complete), torch.is_inference_mode_enabled()
        for key, former in [*self.current.items()]:
            wanted = self.wanted[key]
            stays = (former.device, former.dtype) == (wanted.device, wanted.dtype)
            if (stays and (writable or not former.is_inference())) or (former.is_meta and key not in room):
                continue
            if id(former) not in made:
                if former.is_meta:
                    values = torch.zeros_like(former, dtype=wanted.dtype, device=wanted.device)
                else:
                    values = former.detach().to(wanted.device, wanted.dtype, copy=True)
                is_parameter = isinstance(former, nn.Parameter)
                made[id(former)] = nn.Parameter(values, former.requires_grad) if is_parameter else values
            owner, _, name = key.rpartition(".")
            rollback.replace(self.graph_module.get_submodule(owner), name, made[id(former)])
            self.current[key] = made[id(former)]


def _usable(device: torch.device | str) -> torch.device:
    """Return a device with its index, as tensors on it have it."""
    try:
        found = torch.empty(0, device=device).device
    except Exception as error:  # a name that torch does not know, or a device that is not here
        raise CheckpointError(f"device {str(device)!r} cannot be used: {error}") from error
    if found.type == "meta":
        raise CheckpointError("device is 'meta', where nothing can be loaded")
    return found


def _check_devices(graph_module: GraphModule, device: torch.device) -> None:
    """Refuse a device if the graph itself makes tensors on another one."""
    for node in iter_nodes(graph_module.graph):
        for found in pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(found, torch.device) and found.type not in (device.type, "meta"):
                raise CheckpointError(
                    f"node `{node.name}` makes a tensor on {found}, and the model would be on {device}: capture the "
                    f"model with inputs on {device}"
                )
