"""The seam to torch: the one file of fxopt-cpu that names its private parts, checked at import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, _prims_common
from torch.utils import _python_dispatch

from fxopt_core import require_torch

_OF_C = (
    "_storage_Use_Count",
    "DisableTorchFunction",
    "_AutoDispatchBelowAutograd",
    "_after_autograd_keyset",
    "_get_mkldnn_enabled",
)
_C: Any = torch._C
_NEEDED = [(_C, _OF_C), (_python_dispatch, ("_disable_current_modes",)), (_prims_common, ("suggest_memory_format",))]
require_torch("fxopt-cpu", _NEEDED)

without_modes: Callable[[], Any] = _python_dispatch._disable_current_modes
storage_count: Callable[[int], int] = _C._storage_Use_Count
#: Also disables modes, such as the one that ``torch.device`` enters.
without_functions: Any = _C.DisableTorchFunction
below_autograd: Any = _C._AutoDispatchBelowAutograd
after_autograd: Any = _C._after_autograd_keyset
mkldnn_enabled: Callable[[], bool] = _C._get_mkldnn_enabled


def is_channels_last(tensor: Tensor) -> bool:
    """Return whether strides are channels last as torch decides it, also for one channel or one pixel."""
    return _prims_common.suggest_memory_format(tensor) is torch.channels_last
