"""`Unchanged`: whether modules and tensors are the same objects as before, with the same contents."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from itertools import repeat
from operator import attrgetter, contains, eq, getitem, is_
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.modules import module as global_hooks

from fxopt_cpu.layers.packed_layer import HOOKS, PackedLayer
from fxopt_rewrite import Watched

_generation = attrgetter("generation")
_FORWARD = repeat("forward")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


class Unchanged:
    """The modules that a region calls and the tensors that it reads, with their places, attributes and hooks.

    Attributes of packed layers are not compared: their settings never change. The check runs at each call of the
    region. It is therefore a few calls of C functions over all modules at once, and allocates nothing.

    >>> import torch
    >>> graph_module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    >>> unchanged = Unchanged(graph_module, graph_module.graph.nodes)
    >>> before = unchanged.holds()
    >>> with torch.no_grad():
    ...     _ = graph_module.get_parameter("0.weight").add_(1)
    >>> before, unchanged.holds()
    (True, False)
    """

    def __init__(self, graph_module: GraphModule, nodes: Iterable[Node]) -> None:
        self._places: list[Any] = []
        self._names: list[str] = []
        self._found: list[Any] = []
        self._noted: set[tuple[int, str]] = set()
        targets = dict.fromkeys(str(node.target) for node in nodes if node.op in ("call_module", "get_attr"))
        found = (self._walk(graph_module, target) for target in targets)
        modules = dict.fromkeys(module for module in found if module is not None)
        for module in modules:
            for table in (module._parameters, module._buffers):
                for name in table:
                    self._add(table, name)
        self._owned = [vars(module) for module in modules]
        self._packed = [module for module in modules if isinstance(module, PackedLayer)]
        others = [module for module in modules if not isinstance(module, PackedLayer)]
        self._others, self._attributes = others, [_attributes_of(module) for module in others]
        self._modules, self._types = list(modules), list(map(type, modules))
        self._packings = [layer.packing for layer in self._packed]
        self._generations = list(map(_generation, self._packings))
        self._hooks = [vars(module)[name] for module in modules for name in HOOKS]
        self._hooks += [getattr(global_hooks, name) for name in _GLOBAL_HOOKS]
        self._tensors = list({id(each): each for each in self._found if isinstance(each, Tensor)}.values())
        self._watched = Watched(self._tensors)

    def holds(self) -> bool:
        """Return whether everything is as before, without any hooks."""
        try:
            return (
                all(map(is_, map(getitem, self._places, self._names), self._found))
                and not any(self._hooks)
                and self._watched.hold(self._tensors)
                and all(map(eq, map(_generation, self._packings), self._generations))
                and all(map(is_, map(type, self._modules), self._types))
                and not any(map(contains, self._owned, _FORWARD))
                and all(map(eq, map(vars, self._others), self._attributes))
            )
        except Exception:  # something is gone, or attributes cannot be compared
            return False

    def release_packed(self) -> None:
        """Free the packed weights of the packed layers until they run again."""
        for layer in self._packed:
            layer.packing.clear()

    def _add(self, place: Any, name: str) -> Any:
        """Record the entry of a table, once."""
        found = place[name]
        if (id(place), name) not in self._noted:
            self._noted.add((id(place), name))
            self._places.append(place)
            self._names.append(name)
            self._found.append(found)
        return found

    def _walk(self, graph_module: GraphModule, target: str) -> nn.Module | None:
        """Record the path to a module or a tensor; return the module, or None for a tensor."""
        owner: nn.Module = graph_module
        for name in target.split("."):
            for table in (owner._modules, owner._parameters, owner._buffers):
                if name in table:
                    found = self._add(table, name)
                    break
            else:  # a plain attribute
                found = self._add(vars(owner), name)
            if not isinstance(found, nn.Module):
                return None
            owner = found
        return owner


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module; mutable containers as copies."""
    return {name: copy(value) if type(value) in (list, dict, set) else value for name, value in vars(module).items()}
