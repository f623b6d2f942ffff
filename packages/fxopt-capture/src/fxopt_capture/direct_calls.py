"""Calls of captured modules that go straight to the graph's operators.

A call goes by the pre-hook `InputBinding`, torch's code for nested inputs and the module `InputGuards` before the first
operator runs, which may take as long as the layers of a small model. From the tenth call on, one whose arguments are
recognised as right (`direct_arguments`) runs the operators alone (`direct_graph`). All others go the long way: those
with something wrong, so that there is one place that says what, and those that a hook or a trace is to see.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.compiler import is_dynamo_compiling
from torch.fx import GraphModule
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

from .arguments import InputBinding
from .caches import CacheReturn
from .direct_plan import DirectPlan
from .guards import GUARDS, GuardedCall, InputGuards

_UNKNOWN: Any = object()


class DirectCalls(GraphModule):
    """A graph module whose calls go straight to its operators where their arguments are right, and nothing looks on."""

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; what `torch.nn.Module.__call__` does."""
        own = self.__dict__
        if not (
            is_dynamo_compiling()
            or get_eval_frame_callback() is not None  # what this calls is compiled frame by frame
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or _global_forward_pre_hooks
            or _global_forward_hooks
            or _global_backward_pre_hooks
            or _global_backward_hooks
            or "forward" in own
            or torch._C._get_tracing_state() is not None
        ):
            guards, before, after = own["_modules"].get(GUARDS), own["_forward_pre_hooks"], own["_forward_hooks"]
            binding = next(iter(before.values()), None)
            if (
                type(guards) is InputGuards
                and not (guards._forward_hooks or guards._forward_pre_hooks)
                and (len(before) == 1 or _only_guards(before, guards))
                and (not after or _only_returns_caches(after))
            ):
                plan, forward = guards.plan, type(self).forward
                if plan.forward is forward and plan.binding is binding:
                    recognize = plan.ways.get((len(args), *kwargs) if kwargs else len(args), _UNKNOWN)
                    if recognize is _UNKNOWN:
                        plan.learn(self, guards, args, kwargs)
                    elif recognize is not None:
                        inputs = recognize(args, kwargs, guards)
                        if inputs is not None:
                            output = plan.run(self, *inputs)
                            if output is not NotImplemented:
                                return output if not after else _with_caches(self, args, kwargs, output)
                elif isinstance(binding, InputBinding):
                    guards.plan = DirectPlan(forward, binding)
        return super()._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _only_guards(hooks: Mapping[int, object], guards: InputGuards) -> bool:
    """Whether the only pre-hook beside the binding is the check by these guards."""
    return len(hooks) == 2 and any(type(hook) is GuardedCall and hook.guards is guards for hook in hooks.values())


def _only_returns_caches(hooks: Mapping[int, object]) -> bool:
    return len(hooks) == 1 and all(type(hook) is CacheReturn for hook in hooks.values())


def _with_caches(module: GraphModule, args: tuple[object, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Return the output as the hook gives it that changes the caller's caches."""
    binding = next(hook for hook in module._forward_pre_hooks.values() if isinstance(hook, InputBinding))
    (hook,) = module._forward_hooks.values()
    return hook(module, (), binding.by_name(args, kwargs), output)
