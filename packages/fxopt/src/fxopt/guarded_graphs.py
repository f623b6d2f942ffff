"""A model as several graphs, one for each path that calls take through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxopt_capture import CapturedModule
from fxopt_capture.call.guards import GUARDS, InputGuards, check_mode
from fxopt_capture.huggingface.clients import is_noted
from fxopt_core import PreconditionError, iter_nodes, type_text
from fxopt_core.errors import CaptureError
from fxopt_rewrite import Effects, plain_attributes
from fxopt_tools import Inputs

__all__ = ["GuardedGraphs"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class GuardedGraphs(nn.Module):
    """Captured graphs of one model; a call goes to the first whose checks of inputs accept it.

    `optimize` with ``also`` makes it. Layers that have one name and the same values in several graphs are one module in
    all of them, packed weights included.

    Each graph module in `graphs` has its own history: `history`, `undo`, `save`, `original_state_dict` and others take
    these one by one. Keys of ``state_dict`` begin with ``graphs.0.``, ``graphs.1.`` and so on.

    Args:
        graphs: captured modules of one model, in the order in which calls try them.

    Raises:
        PreconditionError: There are none, or one is no captured module.

    >>> from fxopt import capture
    >>> class Model(nn.Module):
    ...     def forward(self, x):
    ...         return x.cumsum(1) if x.shape[1] > 3 else x * 2
    >>> module = GuardedGraphs(capture(Model(), torch.ones(2, size)) for size in (2, 4))
    >>> module(torch.ones(1, 2)), module(torch.ones(1, 4))
    (tensor([[2., 2.]]), tensor([[1., 2., 3., 4.]]))
    """

    graphs: nn.ModuleList

    def __init__(self, graphs: Iterable[nn.Module]) -> None:
        super().__init__()
        found = list(graphs)
        wrong = next((each for each in found if not isinstance(each, CapturedModule)), None)
        if wrong is not None or not found:
            given = "nothing" if wrong is None else type_text(wrong)
            raise PreconditionError(f"GuardedGraphs is given {given}, expected graph modules that capture made")
        self.graphs = nn.ModuleList(found)
        self.training = found[0].training
        known: dict[str, list[nn.Module]] = {}
        for graph in found:
            _share(graph, known)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the first graph that accepts the call returns.

        Raises:
            CaptureError: None accepts it; the message has the reason of each.
        """
        refusals: list[CaptureError] = []
        for graph in self.graphs:
            try:
                return graph(*args, **kwargs)
            except CaptureError as error:
                if isinstance(error.__cause__, RuntimeError) and _writes(graph):
                    raise  # found midway: a call of another graph would write twice
                refusals.append(error)
        reasons = "; ".join(f"graph {number}: {error}" for number, error in enumerate(refusals))
        name = type(self.graphs[0]).__name__
        raise CaptureError(
            f"none of the {len(refusals)} graphs of {name} accepts this call: give optimize such an example in "
            f"`also`. {reasons}"
        )

    def train(self, mode: bool = True) -> GuardedGraphs:
        """Set the training flag of all modules, or refuse a mode that a graph does not hold.

        Raises:
            CaptureError: A graph computes something else in that mode; nothing was changed.
        """
        for guards in self._guards():
            check_mode(guards.mode, mode)
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GuardedGraphs:
        """Convert or move all graphs, or none if one refuses."""
        undo: list[Callable[[], None]] = []
        try:
            for guards in self._guards():
                # Only to ask: `moved_to` raises if the graph cannot be converted. The conversion below makes the notes
                # that stay.
                if guards.module_dtype is not None:
                    undo.append(guards.moved_to(fn(torch.empty(0, dtype=guards.module_dtype)).dtype))
        finally:
            for take_back in undo:
                take_back()
        return cast("GuardedGraphs", super()._apply(fn, recurse))  # type: ignore[no-untyped-call]  # untyped in torch

    def _guards(self) -> Iterator[InputGuards]:
        for graph in self.graphs:
            yield cast("InputGuards", graph._modules[GUARDS])

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that the graphs have from a Hugging Face model, such as ``config``."""
        # An object that is being copied or unpickled has no `_modules` yet.
        graphs = vars(self).get("_modules", {}).get("graphs")
        if graphs is not None and is_noted(graphs[0], name):
            return getattr(graphs[0], name)
        return super().__getattr__(name)


def accepts(graph_module: nn.Module, call: Inputs) -> bool:
    """Whether a captured module takes the arguments of a call, as far as its checks of inputs tell."""
    captured = cast("CapturedModule", graph_module)
    try:
        inputs = captured._input_binding.bound(call.args, dict(call.kwargs))
        cast("InputGuards", captured._modules[GUARDS])(*pytree.tree_leaves(inputs))
    except CaptureError:
        return False
    return True


def _writes(graph_module: nn.Module) -> bool:
    effects = Effects(cast("CapturedModule", graph_module))
    found = map(effects.effect, iter_nodes(cast("CapturedModule", graph_module).graph))
    return any(effect.writes or effect.opaque for effect in found)


def _share(graph_module: nn.Module, known: dict[str, list[nn.Module]]) -> None:
    """Let a graph share layers with others that have the same name and values; record its other layers."""
    for path, module in list(graph_module.named_modules(remove_duplicate=False)):
        if module._modules or not (module._parameters or module._buffers):
            continue
        others = known.setdefault(path, [])
        same = next((other for other in others if _is_same(module, other)), None)
        if same is None:
            others.append(module)
        else:
            owner, _, name = path.rpartition(".")
            graph_module.get_submodule(owner)._modules[name] = same


def _is_same(one: nn.Module, other: nn.Module) -> bool:
    tensors, others = ({**module._parameters, **module._buffers} for module in (one, other))
    return (
        type(one) is type(other)
        and (one.training, plain_attributes(one)) == (other.training, plain_attributes(other))
        and not any(vars(module)[key] for module in (one, other) for key in _HOOKS)
        and (one._parameters.keys(), tensors.keys()) == (other._parameters.keys(), others.keys())
        and all(_equal(tensor, others[name]) for name, tensor in tensors.items())
    )


def _equal(left: Tensor | None, right: Tensor | None) -> bool:
    if left is right:
        return True
    if left is None or right is None or left.is_meta or right.is_meta:
        return False
    kinds = [(each.dtype, each.device, each.shape, each.stride(), each.requires_grad) for each in (left, right)]
    return kinds[0] == kinds[1] and torch.equal(left, right)
