"""Loops over the experts that tokens were sent to, as a graph can have them: over all experts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class _AllAreHit(TorchFunctionMode):
    """Lets a loop over ``nonzero()`` of one number for each expert run over all experts.

    The loops add what an expert returns to the rows of its tokens: one without tokens adds nothing. The experts are
    tensors of one number each, which an export knows, and which go into names of modules as numbers.
    """

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        is_count = (
            func in (torch.Tensor.nonzero, torch.nonzero) and len(args) == 1 and not kwargs and args[0].dim() == 1
        )
        if is_count and args[0].shape[0] in (self.experts, self.experts + 1):
            return [torch.tensor([expert], device=args[0].device) for expert in range(self.experts)]
        if func is torch.Tensor.__format__ and args[0].dim() == 0:
            return format(args[0].item(), *args[1:])
        return func(*args, **kwargs)


@contextmanager
def all_experts(model: nn.Module) -> Iterator[None]:
    """Let the loops of a model over experts run over all of them, whatever the tokens."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(nn.Module, "to", _to_what_it_is_not(nn.Module.to)))
        for cls in {type(module) for module in model.modules()}:
            if _loops(cls):
                stack.enter_context(patch.object(cls, "forward", _looping(cls.forward)))
        yield


def _to_what_it_is_not(to: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Let a module be the same where it has a dtype already: routers convert their layer in each call.

    Converting swaps the tensors of parameters, which those of an export do not allow.
    """

    @functools.wraps(to)
    def converted(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype):
            tensors = (*self.parameters(), *self.buffers())
            if all(tensor.dtype == args[0] or not tensor.is_floating_point() for tensor in tensors):
                return self
        return to(self, *args, **kwargs)

    return converted


def _loops(cls: type[nn.Module]) -> bool:
    """Whether a class of transformers calls experts in a loop over those that are hit."""
    if not (cls.__name__.endswith("Experts") and cls.__module__.startswith("transformers.")):
        return False
    source = inspect.getsource(cls.forward)
    return ".nonzero()" in source and ".index_add_(0, " in source


def _looping(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def over_all(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _AllAreHit(self.num_experts):
            return forward(self, *args, **kwargs)

    return over_all
