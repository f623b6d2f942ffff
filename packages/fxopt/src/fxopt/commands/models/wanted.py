"""The dtype, device and dynamic sizes that a model is captured with, if the user asks for other than its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxopt.commands.failures import CommandError, ExitCode
from fxopt_capture.exporting.failure import first_line
from fxopt_tools import Inputs


@dataclass(frozen=True)
class Wanted:
    """What a model is captured with.

    Attributes:
        dtype: the dtype of its floating-point tensors, and of those of its inputs; None for its own.
        device: its device; None for its own.
        dynamic: the dimensions that vary, by input; empty for what `capture` chooses.
    """

    dtype: torch.dtype | None = None
    device: torch.device | None = None
    dynamic: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @classmethod
    def read(cls, dtype: str | None, device: str | None, dynamic: Mapping[str, Sequence[int]]) -> Wanted:
        """Return what the options of a command ask for.

        Raises:
            CommandError: There is no such device here.

        >>> Wanted.read("bfloat16", "cpu", {}).dtype
        torch.bfloat16
        """
        return cls(
            None if dtype is None else getattr(torch, dtype), None if device is None else _device(device), dynamic
        )

    def place(self, text: str, model: nn.Module) -> None:
        """Convert a model to this dtype, and move it to this device.

        Raises:
            CommandError: The model is a graph already.
        """
        if self == Wanted():
            return
        if isinstance(model, GraphModule):
            raise CommandError(
                f"{text} is already a graph, with the dtype, device and dynamic sizes of its capture; give --dtype, "
                "--device and --dynamic with the model",
                ExitCode.USAGE,
            )
        model.to(device=self.device, dtype=self.dtype)

    def moved(self, inputs: Inputs) -> Inputs:
        """Return inputs on this device, and those of floating point in this dtype."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._moved, (inputs.args, dict(inputs.kwargs)))
        return Inputs(*args, **kwargs)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self.device, dtype=self.dtype if tensor.is_floating_point() else None)


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.empty(1, device=device)
    except Exception as error:  # torch raises errors of many kinds for devices that it lacks
        raise CommandError(f"--device {text} cannot be used here: {first_line(error)}", ExitCode.USAGE) from error
    if device.type == "meta":
        raise CommandError("--device meta has no values to optimize; give cpu or cuda:0", ExitCode.USAGE)
    return device
