"""The graph module that a capture returns."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from torch import nn
from torch.fx import Graph

from fxopt_core import pickling

from .arguments import InputBinding
from .direct_calls import DirectCalls
from .guards import GUARDS, InputGuards, check_mode


class CapturedModule(DirectCalls):
    """A captured model: a ``torch.fx.GraphModule`` that knows which mode its graph is valid for.

    ``train()`` and ``eval()`` to the mode that it was captured in work as usual; to the other mode they raise a
    `CaptureError`, where the mode changes what the model computes. Copies, and what ``pickle`` and ``torch.save``
    write, keep the graph with all names, non-persistent buffers, ties, the order of keys, the refusals, and the
    pre-hook that accepts calls as the model takes them.
    """

    def train(self, mode: bool = True) -> CapturedModule:
        """Set the training flag of all modules, or refuse a mode that the graph does not hold.

        Raises:
            CaptureError: the graph computes something else in that mode; nothing was changed.
        """
        guards = self._modules.get(GUARDS)
        if isinstance(guards, InputGuards):
            check_mode(guards.mode, mode)
        super().train(mode)
        return self

    def __copy__(self) -> CapturedModule:
        """Return a module that shares graph, tensors and submodules with this one, and has its own dictionaries."""
        copied = CapturedModule(nn.Module(), Graph(), class_name=type(self).__name__)
        for name, value in vars(self).items():
            vars(copied)[name] = value.copy() if isinstance(value, dict | list | set) else value
        copied.recompile()
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedModule:
        with warnings.catch_warnings():
            # torch copies the specifications of inputs and outputs in a way that it deprecates itself.
            warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
            copied = super().__deepcopy__(memo)
        type(copied).__name__ = type(self).__name__  # the class that torch makes for each instance
        for name in ("_parameters", "_buffers", "_modules"):
            content = vars(copied)[name]
            content.clear()
            content.update(copy.deepcopy(vars(self)[name], memo))
        _copy_flags(self, copied)
        for name in (
            "_forward_pre_hooks",
            "_forward_pre_hooks_with_kwargs",
            "_forward_hooks",
            "_forward_hooks_with_kwargs",
        ):
            vars(copied)[name] = copy.copy(vars(self)[name])
        if not isinstance(copied, CapturedModule):
            raise TypeError(f"copying a {type(self).__name__} gave a {type(copied).__name__}")
        return copied


def _copy_flags(source: nn.Module, target: nn.Module) -> None:
    """Give a copy the training flags and the non-persistent buffers of what it was copied from."""
    copies = dict(target.named_modules())
    for name, module in source.named_modules():
        copies[name]._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        copies[name].training = module.training


def assemble(shell: nn.Module, graph: Graph, guards: InputGuards, binding: InputBinding) -> CapturedModule:
    """Return the captured module of a graph.

    Args:
        shell: holds, under their names, all modules, parameters and buffers of the result; used up by this.
        graph: the graph; it calls the guards.
        guards: the check of its inputs.
        binding: accepts calls as the model's ``forward`` takes them.
    """
    captured = CapturedModule(nn.Module(), Graph(), class_name=binding.model_name)
    captured.training = guards.training = shell.training
    captured._modules[GUARDS] = guards
    captured._modules.update(shell._modules)
    captured._parameters.update(shell._parameters)
    captured._buffers.update(shell._buffers)
    captured._non_persistent_buffers_set |= shell._non_persistent_buffers_set
    captured.graph = graph
    captured.register_forward_pre_hook(binding, with_kwargs=True)
    pickling.install(captured)
    return captured
