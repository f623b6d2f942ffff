"""The original in float64: what its output would be without rounding."""

from __future__ import annotations

import copy
import os

import torch
from torch import nn
from torch.fx import GraphModule

from fxopt_core import faithful_copy
from fxopt_tools.inputs import Inputs
from fxopt_tools.running import Outcome, run_once

_SHARE_OF_MEMORY = 0.5


class Reference:
    """A copy of the original in float64, made on first use and run on inputs cast to float64.

    Not every model has one: casts in its code, kernels without float64 or a lack of memory stand in the way.
    """

    def __init__(self, original: nn.Module) -> None:
        self._original = original
        self._copy: nn.Module | None = None
        self._failure: str | None = None

    def run(self, inputs: Inputs) -> Outcome | str:
        """Return what the original leaves behind in float64, or why it cannot be run so."""
        if self._failure is not None:
            return self._failure
        try:
            if self._copy is None:
                self._copy = _in_float64(self._original)
        except Exception as error:
            self._failure = _reason(error)
            return self._failure
        try:
            return run_once(self._copy, inputs, widened=True)
        except Exception as error:  # of any kind: this is a second opinion
            return _reason(error)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _in_float64(module: nn.Module) -> nn.Module:
    _check_memory(module)
    duplicate = faithful_copy(module) if isinstance(module, GraphModule) else copy.deepcopy(module)
    with torch.no_grad():
        return duplicate.double()


def _check_memory(module: nn.Module) -> None:
    """Raise where a copy would not fit: a process that takes too much memory of the CPU may be killed, not told."""
    tensors = [*module.parameters(), *module.buffers()]
    needed = 8 * sum(tensor.numel() for tensor in tensors if tensor.device.type == "cpu")
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not every system tells
        return
    if needed > _SHARE_OF_MEMORY * memory:
        raise MemoryError(f"a copy would take {needed / 2**30:.1f} of {memory / 2**30:.1f} GiB")
