"""Where the tensors of a checkpoint go in a rewritten module, and the devices that they get there."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_checkpoints.load import current_tensors
from fxopt_checkpoints.rollback import Rollback
from fxopt_checkpoints.trace import key_map
from fxopt_core import iter_nodes


class Placement:
    """The tensors of a module, and their devices after loading.

    Args:
        graph_module: the rewritten module.

    Attributes:
        current: the tensors by name.
        devices: their devices after loading, by name.
        loaded: the names of tensors that a checkpoint fills, including tied ones.

    Raises:
        FxoptError: See `key_map`.
    """

    def __init__(self, graph_module: GraphModule) -> None:
        self.graph_module = graph_module
        self.names = key_map(graph_module)
        self.current = current_tensors(graph_module)
        filled = {row.key for row in self.names.originals if row.kept and row.in_state_dict}
        self.loaded = self._with_ties(filled | {target.name for target in self.names.new_tensors})
        # What is on the meta device goes where the graph was captured for: to the device of its inputs, or else of its
        # tensors, or the CPU.
        inputs = (node for node in iter_nodes(graph_module.graph) if node.op == "placeholder")
        values = [value for node in inputs if isinstance(value := node.meta.get("val"), Tensor)]
        devices = (tensor.device for tensor in (*values, *self.current.values()))
        captured = next((device for device in devices if device.type != "meta"), torch.device("cpu"))
        self.devices = {key: captured if each.is_meta else each.device for key, each in self.current.items()}

    def _with_ties(self, keys: set[str]) -> set[str]:
        ids = {id(self.current[key]) for key in keys & self.current.keys()}
        return {key for key, tensor in self.current.items() if id(tensor) in ids}

    def make_room(self, complete: set[str], rollback: Rollback) -> None:
        """Replace tensors on the meta device that get all of their values, and those that cannot be written here."""
        made: dict[int, Tensor] = {}
        room, writable = self._with_ties(complete), torch.is_inference_mode_enabled()
        for key, former in [*self.current.items()]:
            # Outside of inference mode, torch refuses to write into a tensor that was made in it.
            stays = key not in room if former.is_meta else writable or not former.is_inference()
            if stays:
                continue
            if id(former) not in made:
                plain = former.detach()
                values = torch.zeros_like(plain, device=self.devices[key]) if plain.is_meta else plain.clone()
                is_parameter = isinstance(former, nn.Parameter)
                made[id(former)] = nn.Parameter(values, former.requires_grad) if is_parameter else values
            owner, _, name = key.rpartition(".")
            rollback.replace(self.graph_module.get_submodule(owner), name, made[id(former)])
            self.current[key] = made[id(former)]
