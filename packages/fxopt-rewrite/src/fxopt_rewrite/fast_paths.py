"""The modes around a call: when a layer may take a fast path of its own, and where tensors are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fxopt_rewrite._torch import (
    dispatch_modes,
    forward_level,
    function_modes,
    functorch_level,
    is_any_autocast_enabled,
    tracing_state,
)


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leave inference mode, if the caller is in it, so that new tensors are plain ones; no gradients are recorded then.

    >>> with torch.inference_mode(), outside_inference_mode():
    ...     torch.ones(1).is_inference(), torch.is_grad_enabled()
    (False, False)
    """
    if torch.is_inference_mode_enabled():  # leaving it where it is off would turn other modes of autograd on
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


def runs_plainly() -> bool:
    """Return whether operators called now just run, so that a call may take the fast path.

    It may not while a graph is recorded (``torch.compile``, ``torch.export``, ``torch.jit.trace``), inside
    ``torch.func`` transforms and forward-mode differentiation, under modes that intercept calls, and under autocast.

    >>> runs_plainly()
    True
    >>> with torch.autocast("cpu"):
    ...     runs_plainly()
    False
    """
    # `is_compiling` first: dynamo takes it for True, and then traces none of the private functions below.
    return not (
        torch.compiler.is_compiling()
        or dispatch_modes()
        or function_modes()
        or functorch_level() is not None
        or forward_level() >= 0
        or tracing_state() is not None
        or is_any_autocast_enabled()
    )


def runs_in_transform() -> bool:
    """Return whether the current call runs inside ``torch.vmap`` or another transform of ``torch.func``.

    >>> torch.vmap(lambda row: row + runs_in_transform())(torch.zeros(2))
    tensor([1., 1.])
    """
    return not torch.compiler.is_compiling() and functorch_level() is not None


def is_plain_tensor(value: object, dtype: torch.dtype) -> bool:
    """Return whether a value is a dense CPU tensor of this dtype, and of no subclass."""
    return type(value) is Tensor and value.dtype is dtype and value.is_cpu and value.layout is torch.strided


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Return whether autograd records a call with these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
