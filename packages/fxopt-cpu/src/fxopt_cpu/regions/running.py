"""Which calls of a region run as one: those of a known kind, while nothing has changed since its plan was made."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from copy import copy
from itertools import repeat
from operator import contains, eq, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.modules import module as global_hooks

from fxopt_cpu.layers.panel_linear import PanelLinear
from fxopt_cpu.operators.definition import without_gradient
from fxopt_cpu.operators.plan import Plan
from fxopt_cpu.regions.finding import LAYERS, regions_of
from fxopt_cpu.regions.planning import Planned, plan_of
from fxopt_rewrite import Watched, on_refresh
from fxopt_rewrite.toolbox import is_edited, is_fused_convolution, runs_plainly

RUN = without_gradient(torch.ops.fxopt.run.default)
_MOST_PLANS = 512  # encoders of sentences see a kind for each length and size of a batch
_TAKEN = (torch.float32, torch.int64, torch.bool)
_READ: Any = dict.__getitem__  # which does not thaw
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
_FORWARD = repeat("forward")


class Unchanged:
    """The modules that a region calls and the tensors that it reads: whether they are those of before.

    Parameters beside the panels are operands of each call, so that it is enough that they are the same objects.
    """

    def __init__(self, graph_module: GraphModule, nodes: Iterable[Node]) -> None:
        self._places: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._found: list[Any] = []
        modules: dict[nn.Module, None] = {}
        for target in dict.fromkeys(str(node.target) for node in nodes if node.op in ("call_module", "get_attr")):
            found = self._walk(graph_module, target)
            if isinstance(found, nn.Module):
                modules[found] = None
        self._layers = [module for module in modules if isinstance(module, PanelLinear)]
        self._packings = [layer.packed() for layer in self._layers]
        for module in modules:
            for key in ("_parameters", "_buffers"):  # which a rollback replaces by those of before the packing
                table = self._add(vars(module), key)
                for name in table:
                    if not isinstance(module, PanelLinear) or name not in ("weight", "scale", "rounding"):
                        self._add(table, name)
        self._owned = [vars(module) for module in modules]
        others = [module for module in modules if not isinstance(module, LAYERS)]
        self._others, self._attributes = others, [_attributes_of(module) for module in others]
        self._hooks = [vars(module)[name] for module in modules for name in _HOOKS]
        self._hooks += [getattr(global_hooks, name) for name in _GLOBAL_HOOKS]
        # What is converted for the operators is a copy.
        wide = [each for each in self._found if isinstance(each, Tensor) and each.dtype is not torch.float32]
        wide += [module.weight for module in modules if is_fused_convolution(module)]
        self._converted, self._watched = wide, Watched(wide)

    def holds(self) -> bool:
        """Return whether everything is as before, without any hooks."""
        try:
            return (
                all(map(is_, map(_READ, self._places, self._names), self._found))
                and not any(self._hooks)
                and all(map(is_, map(PanelLinear.packed, self._layers), self._packings))
                and (not self._converted or self._watched.hold(self._converted))
                and not any(map(contains, self._owned, _FORWARD))
                and all(map(eq, map(vars, self._others), self._attributes))
            )
        except Exception:  # something is gone, or attributes cannot be compared
            return False

    def _add(self, place: dict[str, Any], name: str) -> Any:
        found = _READ(place, name)
        self._places.append(place)
        self._names.append(name)
        self._found.append(found)
        return found

    def _walk(self, graph_module: GraphModule, target: str) -> object:
        """Record the path to a module or a tensor, and return it."""
        owner: Any = graph_module
        for name in target.split("."):
            tables = (owner._modules, owner._parameters, owner._buffers, vars(owner))
            owner = self._add(next(table for table in tables if name in table), name)
        return owner


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {name: copy(value) if type(value) in (list, dict, set) else value for name, value in vars(module).items()}


class RegionPlans:
    """The plans of a region, by kind of input: shapes, strides, dtypes and numbers.

    One is made when a kind arrives first, so that the first result has the bits of the later ones.
    """

    def __init__(self, key: tuple[str, str]) -> None:
        self._key = key  # not the nodes, which would keep the graph module alive
        self.forget()

    def forget(self) -> None:
        """Drop all plans."""
        self._unchanged: Unchanged | None = None
        self.plans: dict[tuple[object, ...], Planned | None] = {}
        self._panels: dict[object, Tensor] = {}

    def run(self, graph_module: GraphModule, values: tuple[Any, ...]) -> list[Tensor] | None:
        """Return the outputs for inputs, or None if the nodes have to run one by one."""
        kind = _kind_of(values)
        if kind is None:
            return None
        if self._unchanged is not None and not self._unchanged.holds():
            self.forget()
        if kind not in self.plans:
            self._make(graph_module, kind, values)
        planned = self.plans.get(kind)
        if planned is None:
            return None
        plan, results = planned
        try:
            outputs: list[Tensor] = RUN([value for value in values if type(value) is Tensor], plan.weights, plan.steps)
        except RuntimeError:  # an index is out of range, or a weight has another size: the nodes say it in their words
            return None
        return planned.finish(outputs) if any(results) else outputs

    def _make(self, graph_module: GraphModule, kind: tuple[object, ...], values: tuple[Any, ...]) -> None:
        region = None if is_edited(graph_module) else _find(graph_module, self._key)
        if region is None:
            return
        unchanged = self._unchanged
        try:  # first, so that it knows what the plan is made of
            unchanged = unchanged or Unchanged(graph_module, region.nodes)
        except RuntimeError:  # tensors of inference mode have no version
            return
        planned = plan_of(graph_module, region, values, self._panels)
        for known in self.plans.values():  # of the same shapes, strided otherwise
            if known is not None and planned is not None and torch.equal(known.plan.steps, planned.plan.steps):
                planned = Planned(known.plan, planned.results)
        if unchanged.holds():
            self._unchanged = unchanged
            latest = list(self.plans.items())[1 - _MOST_PLANS :]
            self.plans = {**dict(latest), kind: planned}


def _find(graph_module: GraphModule, key: tuple[str, str]) -> Any:
    return next((region for region in regions_of(graph_module) if region.key == key), None)


_Regions = tuple[Callable[..., Any], dict[tuple[str, str], RegionPlans]]
# The plans of the regions of each graph module, and the generated ``forward`` that they belong to.
_REGIONS: weakref.WeakKeyDictionary[nn.Module, _Regions] = weakref.WeakKeyDictionary()


def run_plan(graph_module: nn.Module, first: str, last: str, *values: Any) -> list[Tensor] | None:
    """Return the outputs of a region, or None if its nodes have to run one by one.

    The code that `PlanRegions` generates calls it with the module, the names of the region's first and last node, and
    its inputs. The nodes run one by one under autograd, tracing and modes, for what the operators do not take, and
    while a module of the region has a hook.
    """
    if torch.is_grad_enabled() or not runs_plainly() or not isinstance(graph_module, GraphModule):
        return None
    forward, plans = _REGIONS.get(graph_module, (None, {}))
    if forward is not type(graph_module).forward:
        regions = () if is_edited(graph_module) else regions_of(graph_module)
        plans = {region.key: RegionPlans(region.key) for region in regions}
        _REGIONS[graph_module] = type(graph_module).forward, plans
    region = plans.get((first, last))
    return None if region is None else region.run(graph_module, values)


@on_refresh
def _forget(module: nn.Module) -> None:
    """Drop the plans of all graph modules in a model."""
    for each in module.modules():
        for region in _REGIONS.get(each, (None, {}))[1].values():
            region.forget()


def plans_of(graph_module: GraphModule) -> list[Plan]:
    """Return the current plans of a graph module."""
    _, regions = _REGIONS.get(graph_module, (None, {}))
    found = (made.plan for region in regions.values() for made in region.plans.values() if made is not None)
    return list({id(plan): plan for plan in found}.values())


def _kind_of(values: tuple[Any, ...]) -> tuple[object, ...] | None:
    """Return what a plan depends on besides weights; None for inputs that plans do not take."""
    kind: list[object] = []
    for value in values:
        if type(value) is Tensor:
            if value.dtype not in _TAKEN or not value.is_cpu or value.layout is not torch.strided:
                return None
            kind += (value.shape, value.dtype, None if value.is_contiguous() else value.stride())
        elif type(value) in (int, float, bool):
            kind += (type(value), value.hex() if type(value) is float else value)  # 0.0 is not -0.0
        else:
            return None
    return tuple(kind)
