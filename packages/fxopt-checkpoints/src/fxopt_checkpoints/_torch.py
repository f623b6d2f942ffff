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
#: The last part of the key under which a ``state_dict`` has what a module's ``get_extra_state`` returns.
EXTRA_STATE = module._EXTRA_STATE_KEY_SUFFIX
#: Methods that only copy tensors; that of batch norm also fills in a counter that old checkpoints lack.
plain_loaders = (nn.Module._load_from_state_dict, batchnorm._NormBase._load_from_state_dict)
#: Makes a tensor of a subclass that has a shape and no memory of its own.
make_wrapper: Callable[..., Any] = Tensor._make_wrapper_subclass
