"""What calling a module may write, and what its result may share memory with.

Exact types of ``torch.nn`` are in `fxopt_rewrite.ops.tables`. fxopt's layers that write nothing set ``only_computes``,
and ``shares_inputs`` unless their results are new tensors. Every other module, and any with hooks, is opaque: it may
write and share its inputs, parameters and buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from fxopt_rewrite.effects.rules import OPAQUE, Argument, Rule
from fxopt_rewrite.layers import conv1d_class
from fxopt_rewrite.ops import tables

_INPUT = Argument(0, "input")
_KNOWN = tables.FRESH_MODULES | tables.ALIASING_MODULES
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_WRITERS_OF_STATISTICS = (*_BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class ModuleRule:
    """The effect of calling one module on its inputs, and the parameters and buffers that it writes."""

    rule: Rule
    written: tuple[Tensor, ...] = ()


def rule_of_module(module: object) -> ModuleRule:
    """Return what calls of a module do."""
    if not isinstance(module, nn.Module):
        return ModuleRule(OPAQUE)
    cls = type(module)
    # What `torch.export` inserts to check inputs, or a class that says the same of itself.
    guards = cls.__name__ == "GuardsFn" and cls.__module__ == "torch.export._unlift"
    if guards or getattr(cls, "only_checks_inputs", False):
        return ModuleRule(Rule("nn.GuardsFn"))
    known = getattr(cls, "only_computes", False) or cls in _KNOWN or cls is conv1d_class()
    if not known or not is_plain_module(module):
        return ModuleRule(OPAQUE, tuple(tensors_of(module)))
    shares = cls in tables.ALIASING_MODULES or getattr(cls, "shares_inputs", False)
    rule = Rule(f"nn.{cls.__name__}", aliases_all=shares)
    if module.__dict__.get("inplace", getattr(cls, "inplace", False)):
        rule = Rule(rule.operation, writes=(_INPUT,), aliases=(_INPUT,))
    return ModuleRule(rule, tuple(_written(module)))


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a module and its children."""
    yield from module.parameters()
    yield from module.buffers()


def is_plain_module(module: nn.Module) -> bool:
    """Return whether calling a module just calls its class's ``forward``: no hooks, no patched ``forward``."""
    state = module.__dict__
    return "forward" not in state and not any(map(state.get, _HOOKS))


def _written(module: nn.Module) -> Iterator[Tensor]:
    if isinstance(module, _WRITERS_OF_STATISTICS) and module.training:
        yield from (buffer for buffer in module._buffers.values() if buffer is not None)
    # With `max_norm`, a lookup renormalises the rows that it reads, in place.
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
        yield module.weight
