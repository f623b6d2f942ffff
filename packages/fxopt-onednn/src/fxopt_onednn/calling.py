"""Whether a call may take the fast way: nothing differentiates it, watches it, traces it or changes its dtype."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

_C = torch._C
_dispatch_modes, _function_modes = _C._len_torch_dispatch_stack, _C._len_torch_function_stack
_functorch_level = _C._functorch.peek_interpreter_stack
_is_cpu = torch.device("cpu")


def runs_plainly() -> bool:
    """Return whether operators that are called now just run.

    Not so while a graph is recorded (``torch.compile``, ``torch.export``, ``torch.jit.trace``), inside of
    transformations of ``torch.func`` and forward-mode derivatives, under modes that intercept calls, under autocast,
    and where the user has switched oneDNN off.

    >>> runs_plainly()
    True
    >>> with torch.autocast("cpu"):
    ...     runs_plainly()
    False
    """
    return not (
        torch.compiler.is_compiling()
        or _dispatch_modes()
        or _function_modes()
        or _functorch_level() is not None
        or forward_ad._current_level >= 0
        or _C._get_tracing_state() is not None
        or torch.is_autocast_enabled("cpu")
        or not _C._get_mkldnn_enabled()
    )


def is_plain(value: object, dtype: torch.dtype) -> bool:
    """Return whether a value is a dense tensor on the CPU, of this dtype and of no subclass."""
    return type(value) is Tensor and value.dtype is dtype and value.is_cpu and value.layout is torch.strided


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Return whether a call with these tensors is differentiated."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
