"""What an operator is, apart from its kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from fxopt_cpu._torch import after_autograd, below_autograd


class Operator(NamedTuple):
    """An operator of the namespace `fxopt`.

    Attributes:
        schema: Name, arguments and results, as `torch.library.define` takes them.
        reference: Computes the results with torch's operators, in the kernel's memory format: what the kernel has to
            compute, and what runs where there is no kernel, also under fake tensors and on the device `meta`.
    """

    schema: str
    reference: Callable[..., Any]

    @property
    def name(self) -> str:
        """The name without the namespace."""
        return self.schema.partition("(")[0]

    def with_gradient(self, keys: torch.DispatchKeySet, *args: Any) -> Any:
        """Compute with the reference where autograd records the call: kernels have no derivatives.

        Raises:
            RuntimeError: The gradient would go through integers or a plan.
        """
        tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        if any(map(_is_recorded, tensors)):
            # `run` has no reference that could compute, and rounding to integers has a gradient of zeros.
            if self.name == "run" or any(each.dtype is torch.int8 for each in tensors):
                raise RuntimeError(
                    f"fxopt::{self.name} has no derivative for plans and int8 weights, and an operand requires a "
                    "gradient: call it under torch.no_grad(), or call the layer that it stands for"
                )
            return self.reference(*args)
        # `redispatch` takes the keys as given; the guard covers operators that the kernel or the reference calls.
        with below_autograd():
            return getattr(torch.ops.fxopt, self.name).default.redispatch(keys & after_autograd, *args)


def without_gradient(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator for calls that autograd does not record, without the check whether it does."""

    # Callers ask `needs_gradient` themselves: the kernel for autograd would ask again, in Python.
    def call(*args: Any) -> Any:
        with below_autograd():
            return operator(*args)

    return call


def _is_recorded(tensor: Tensor) -> bool:
    if torch.is_grad_enabled() and tensor.requires_grad:
        return True
    if forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]  # untyped in torch
