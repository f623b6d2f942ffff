"""The seam to torch: the one file of fxopt-rewrite that names its private parts, checked at import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace
from torch.utils import _mode_utils

from fxopt_core import require_torch

_C = torch._C
_OF_C = ("_len_torch_dispatch_stack", "_len_torch_function_stack", "_functorch", "_get_tracing_state")
_OF_DISPATCH = ("_dispatch_has_kernel", "_dispatch_has_kernel_for_dispatch_key", "_is_any_autocast_enabled")
require_torch(
    "fxopt-rewrite",
    [
        (_C, (*_OF_C, *_OF_DISPATCH)),
        (autocast_mode, ("_enter_autocast", "_exit_autocast")),
        (forward_ad, ("_current_level",)),
        (_symbolic_trace, ("_assert_is_none",)),
        (_mode_utils, ("no_dispatch",)),
        (torch.UntypedStorage, ("_expired",)),
    ],
)

dispatch_modes, function_modes = _C._len_torch_dispatch_stack, _C._len_torch_function_stack
functorch_level: Callable[[], Any] = _C._functorch.peek_interpreter_stack
tracing_state: Callable[[], Any] = _C._get_tracing_state
is_any_autocast_enabled: Callable[[], bool] = _C._is_any_autocast_enabled
has_kernel: Callable[[str], bool] = _C._dispatch_has_kernel
has_kernel_for: Callable[[str, str], bool] = _C._dispatch_has_kernel_for_dispatch_key
enter_autocast, exit_autocast = autocast_mode._enter_autocast, autocast_mode._exit_autocast
assert_is_none: Callable[..., Any] = _symbolic_trace._assert_is_none
no_dispatch: Callable[[], Any] = _mode_utils.no_dispatch
is_gone: Callable[..., Any] = torch.UntypedStorage._expired


def forward_level() -> int:
    """Return the level of forward-mode differentiation; -1 outside of it."""
    return forward_ad._current_level
