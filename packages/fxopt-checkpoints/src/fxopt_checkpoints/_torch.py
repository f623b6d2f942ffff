"""The seam to torch: the one file of fxopt-checkpoints that names its private parts, checked at import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.modules import batchnorm, module

from fxopt_core import require_torch

require_torch(
    "fxopt-checkpoints",
    [
        (nn.Module, ("_load_from_state_dict",)),
        (batchnorm, ("_NormBase",)),
        (module, ("_IncompatibleKeys", "_EXTRA_STATE_KEY_SUFFIX")),
        (Tensor, ("_make_wrapper_subclass",)),
    ],
)

IncompatibleKeys: TypeAlias = module._IncompatibleKeys
EXTRA_STATE = module._EXTRA_STATE_KEY_SUFFIX
plain_loaders = (nn.Module._load_from_state_dict, batchnorm._NormBase._load_from_state_dict)
make_wrapper: Callable[..., Any] = Tensor._make_wrapper_subclass
