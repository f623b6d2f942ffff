"""The seam to torch: the one file of fxopt-compile that names its private parts, checked at import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from fxopt_core import require_torch

_C = torch._C
_OF_C = ("_len_torch_dispatch_stack", "_functorch", "_DisableAutocast", "_set_grad_enabled")
require_torch("fxopt-compile", [(_C, _OF_C), (forward_ad, ("_current_level",))])

dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
functorch_level: Callable[[], Any] = _C._functorch.peek_interpreter_stack
without_autocast: Any = _C._DisableAutocast
set_grad_enabled: Callable[..., Any] = _C._set_grad_enabled


def forward_level() -> int:
    """Return the level of forward-mode differentiation; -1 outside of it."""
    return forward_ad._current_level
