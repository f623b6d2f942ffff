"""Run a region as one call, for a known kind of input and while nothing has changed since its plan was made."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from copy import copy
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.modules import module as global_hooks

from fxopt_core import latest_change
from fxopt_cpu.layers.packed_layer import PackedLayer
from fxopt_cpu.layers.thawing import Layer, Thawing, thawing
from fxopt_cpu.operators.definition import without_gradient
from fxopt_cpu.regions.finding import regions_of
from fxopt_cpu.regions.images import Kept, plain_layer_of
from fxopt_cpu.regions.planning import Planned, plan_of
from fxopt_rewrite import GraphIndex, Watched, is_edited, on_refresh, runs_plainly

RUN = without_gradient(torch.ops.fxopt.run.default)
_MOST_PLANS = 512  # encoders of sentences see a kind for each length and size of a batch
_TAKEN = (torch.float32, torch.int64, torch.bool)
_READ: Any = dict.__getitem__  # which does not thaw
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")  # those of gradients do nothing where there are none
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
_TABLES = ("_modules", "_parameters", "_buffers")
_PLANNING = threading.RLock()  # no other thread packs meanwhile, or plans the same


class Unchanged:
    """The modules and tensors of a region as they were noted, and whether they still are so.

    Layers of this family report their changes (`Layer`, `Thawing`) through one marker: they are compared only after
    one of them has changed. What reports nothing is compared at each call: modules of torch, hooks, children of a
    model's own modules, and weights that something else refers to. Parameters beside the panels are operands of each
    call, so that it is enough that they are the same objects.
    """

    def __init__(self, graph_module: GraphModule, nodes: Sequence[Node]) -> None:
        self._places: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        tables: dict[int, dict[str, Any]] = {}
        modules: dict[nn.Module, None] = {}
        index = GraphIndex(graph_module)
        plain = [call for node in nodes if (call := plain_layer_of(index, node)) is not None]
        refs = [ref for call in plain for ref in call.tensors]
        nodes = [*nodes, *(ref.node for ref in refs if ref.node is not None)]  # which may stand before the region
        for target in dict.fromkeys(str(node.target) for node in nodes if node.op in ("call_module", "get_attr")):
            found = self._walk(graph_module, target, tables)
            if isinstance(found, nn.Module):
                modules[found] = None
        self._packed = [(module, module.packed()) for module in modules if isinstance(module, PackedLayer)]
        makers: dict[nn.Module, Any] = {module: packed.makers for module, packed in self._packed if packed is not None}
        for module in modules:
            for key in ("_parameters", "_buffers"):
                held = thawing(module, key) if isinstance(module, Layer) else vars(module)[key]
                self._add(vars(module), key)  # a rollback brings back the former dictionary
                for name in dict.keys(held):
                    # Packed tensors come and go as they are read; `packed()` tells whether they have changed.
                    if name not in makers.get(module, ()):
                        self._add(held, name)
                if not isinstance(module, Layer):
                    tables[id(held)] = held
        self._tables = list(tables.values())
        self._snapshots: list[dict[str, Any]] = []
        self._modules = list(modules)
        self._states = [(type(module), _attributes_of(module)) for module in modules]
        self._others = [module for module in modules if not isinstance(module, Layer)]
        self._hooks = [vars(module)[name] for module in modules for name in _HOOKS]
        self._hooks += [getattr(global_hooks, name) for name in _GLOBAL_HOOKS]
        # What is converted or computed for the operators is a copy.
        read = {id(ref.tensor) for ref in refs}
        self._copied = [
            (table, name) for table, name, found in self._places.values()
            if isinstance(found, Tensor) and (found.dtype is not torch.float32 or id(found) in read)
        ]  # fmt: skip
        self._copied_watched = Watched([_READ(*place) for place in self._copied])
        self.kept: Kept = {}
        self._number: object = None
        self._calls = 0

    def holds(self) -> bool:
        """Return whether everything is as before, without any hooks."""
        number = latest_change()  # first: what changes from here on gives it another value
        try:
            # One number stands for all layers: comparing them at each call took 0.43 of the 4.8 ms of MobileNetV2.
            if number is not self._number or not self._as_noted():
                with _PLANNING:
                    if not self._compare():
                        return False
                    self._note(number)
            return not any(self._hooks)
        except Exception:  # something is gone, or attributes cannot be compared
            return False

    def _as_noted(self) -> bool:
        """Return whether what reports no changes is as it was noted."""
        try:
            # Identical tensors are equal; others are compared by value, which raises an error for several elements.
            if self._tables != self._snapshots or [*map(vars, self._others)] != self._attributes:
                return False
            if [*map(type, self._others)] != self._types:
                return False
            if self._droppable:  # one in each call: once nobody refers to it any more, it is dropped
                self._calls += 1
                held, names = self._droppable[self._calls % len(self._droppable)]
                if held.droppable(*names):
                    return False
            return not self._open or self._watched.hold(starmap(_READ, self._open))
        except Exception:  # as above
            return False

    def _compare(self) -> bool:
        """Return whether everything is as before, and pack what has been unpacked."""
        return (
            all(_READ(table, name) is found for table, name, found in self._places.values())
            and [(type(module), vars(module)) for module in self._modules] == self._states
            and all(module.packed() is packed for module, packed in self._packed)
            and self._copied_watched.hold(starmap(_READ, self._copied))
        )

    def _note(self, number: object) -> None:
        """Note everything. The number has to be read before the comparison."""
        self._snapshots = [dict(table) for table in self._tables]
        self._types = [type(module) for module in self._others]
        self._attributes = [_attributes_of(module) for module in self._others]
        self._open, self._droppable, watched = list(self._copied), [], [self._copied_watched]
        for module, packed in self._packed:
            if packed is None or module.holder.frozen:
                continue
            self._open += [(module.holder, name) for name in packed.makers]
            watched.append(packed.made_of)
            if module.drops:
                self._droppable.append((module.holder, tuple(packed.makers)))
        self._watched = Watched.joined(watched)
        self._number = number

    def _add(self, place: dict[str, Any], name: str) -> Any:
        found = _READ(place, name)
        self._places[id(place), name] = place, name, found
        return found

    def _walk(self, graph_module: GraphModule, target: str, tables: dict[int, dict[str, Any]]) -> object:
        """Record the path to a module or a tensor, and return it."""
        owner: Any = graph_module
        for name in target.split("."):
            key = next((key for key in _TABLES if name in vars(owner)[key]), None)
            if key is not None and type(owner) is nn.Module:  # a name space that torch.fx has made
                thawing(owner, key)
            table = vars(owner) if key is None else self._add(vars(owner), key)
            if type(table) is not Thawing:
                tables[id(table)] = table
            owner = self._add(table, name)
        return owner


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {name: copy(value) if type(value) in (list, dict, set) else value for name, value in vars(module).items()}


_Kind = tuple[object, ...]
_Plans = dict[_Kind, Planned | None]


class RegionPlans:
    """The plans of a region, by kind of input: shapes, strides, dtypes and numbers.

    A plan is made when its kind first arrives, so that the first result has the bits of the later ones.
    """

    def __init__(self, key: tuple[str, str]) -> None:
        self._key = key  # not the nodes, which would keep the graph module alive
        self.forget()

    def forget(self) -> None:
        """Drop all plans."""
        # One object: another thread never sees plans beside what others were made of.
        self._state: tuple[Unchanged | None, _Plans] = None, {}

    def run(self, graph_module: GraphModule, values: tuple[Any, ...]) -> list[Tensor] | None:
        """Return the outputs for inputs, or None if the nodes have to run one by one."""
        kind = _kind_of(values)
        if kind is None:
            return None
        unchanged, plans = self._state
        if kind not in plans or unchanged is None or not unchanged.holds():
            with _PLANNING:
                plans = self._made_again(graph_module, kind, values)
        planned = plans.get(kind)
        if planned is None:
            return None
        plan, tensors = planned.plan, [value for value in values if isinstance(value, Tensor)]
        try:
            outputs: list[Tensor] = RUN(tensors, plan.weights, plan.steps)
        except RuntimeError:  # an index is out of range, or a weight has another size: the nodes raise their own errors
            return None
        return planned.finish(values, outputs) if planned.results else outputs

    def _made_again(self, graph_module: GraphModule, kind: _Kind, values: tuple[Any, ...]) -> _Plans:
        """Return plans with one for this kind of input, and keep them if nothing has changed meanwhile."""
        unchanged, plans = self._state
        if unchanged is not None and not unchanged.holds():
            self.forget()
            unchanged, plans = self._state
        regions = () if is_edited(graph_module) else regions_of(graph_module)
        region = next((each for each in regions if each.key == self._key), None)
        if region is None or kind in plans:  # another thread was faster
            return plans
        try:  # first, so that it knows what the plan is made of
            unchanged = unchanged or Unchanged(graph_module, region.nodes)
        except RuntimeError:  # tensors of inference mode have no version
            return plans
        planned = plan_of(graph_module, region, values, unchanged.kept)
        if unchanged.holds():
            plans = {**dict(list(plans.items())[1 - _MOST_PLANS :]), kind: planned}
            self._state = unchanged, plans
        return plans


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
    # `recompile` makes a new `forward`, perhaps of a graph with other regions.
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


def _kind_of(values: tuple[Any, ...]) -> _Kind | None:
    """Return what a plan depends on besides weights; None for inputs that plans do not take."""
    kind: list[object] = []
    for value in values:
        if type(value) is Tensor or type(value) is nn.Parameter:  # which the graph reads before the region
            if value.dtype not in _TAKEN or not value.is_cpu or value.layout is not torch.strided:
                return None
            kind += (value.shape, value.dtype, None if value.is_contiguous() else value.stride())
        elif type(value) in (int, float, bool):
            kind += (type(value), value.hex() if type(value) is float else value)  # 0.0 is not -0.0
        else:
            return None
    return tuple(kind)
