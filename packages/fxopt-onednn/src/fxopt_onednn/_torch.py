"""The seam to torch: the one file of fxopt-onednn that names its private parts, checked at import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxopt_core import require_torch

_C: Any = torch._C
require_torch("fxopt-onednn", [(_C, ("_get_mkldnn_enabled",))])

mkldnn_enabled: Callable[[], bool] = _C._get_mkldnn_enabled
# Regions become programs of TorchScript by these; without, layers run one by one.
_SCRIPTS = ("_jit_llga_enabled", "_jit_set_llga_enabled", "_create_graph_by_tracing", "_create_function_from_graph")
scripts: Any = _C if all(hasattr(_C, name) for name in _SCRIPTS) else None
