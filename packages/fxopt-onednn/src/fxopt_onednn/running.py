"""Running a region of a graph module as one program, where it is there, and all is as it was when that was made."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_onednn.calling import runs_plainly
from fxopt_onednn.fusible import regions_of
from fxopt_onednn.guards import Guard
from fxopt_onednn.programs import Program, made_program

_MOST_PROGRAMS = 4
_MOST_KINDS = 64
_float, _strided = torch.float32, torch.strided


class RunningRegion:
    """One region and its programs, by kind of input: shapes, strides, numbers, and how many threads there are.

    A program is made when a kind of input comes for the second time; each further one takes twice as many calls, so
    that making them never takes much of the time where kinds hardly repeat, or weights keep changing.
    """

    def __init__(self, key: tuple[str, str]) -> None:
        self._key = key  # not the nodes, which would keep the graph module alive
        self._made = 0
        self.forget()

    def forget(self) -> None:
        """Let go of all programs."""
        self._ready: tuple[Guard | None, dict[tuple[object, ...], Program | None]] = (None, {})
        self._seen: dict[tuple[object, ...], int] = {}

    @property
    def programs(self) -> list[Program]:
        """The programs that there are."""
        return [program for program in self._ready[1].values() if program is not None]

    def run(self, graph_module: GraphModule, values: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the outputs for inputs, or None where the nodes are to be run one by one."""
        kind = _kind_of(values)
        if kind is None:
            return None
        guard, programs = self._ready
        if guard is not None and not guard.holds():
            self.forget()
            return None
        if kind not in programs:
            self._count(graph_module, kind, values)
            programs = self._ready[1]
        program = programs.get(kind)
        if program is None:
            return None
        return program(*(value for value in values if type(value) is Tensor))

    def _count(self, graph_module: GraphModule, kind: tuple[object, ...], values: tuple[Any, ...]) -> None:
        """Note that a kind of input came; make its program if it has come often enough."""
        if len(self._seen) >= _MOST_KINDS:
            self._seen.clear()
        seen = self._seen[kind] = self._seen.get(kind, 0) + 1
        if seen > 1 << min(self._made, 20):
            self._made += 1
            self._make(graph_module, kind, values)

    def _make(self, graph_module: GraphModule, kind: tuple[object, ...], values: tuple[Any, ...]) -> None:
        if _is_edited(graph_module):
            return
        region = next((region for region in regions_of(graph_module) if region.key == self._key), None)
        if region is None:
            return
        try:
            guard = Guard(graph_module, region.nodes)
        except (AttributeError, KeyError, RuntimeError):  # modules are gone, or tensors cannot be watched for changes
            return
        program = made_program(graph_module, region, values) if guard.holds() else None
        if not guard.holds():
            return
        if len(self.programs) >= _MOST_PROGRAMS:
            self.forget()
        self._ready = guard, {**self._ready[1], kind: program}
        if program is not None:  # it has packed weights of its own
            guard.release_packed()


class _Running:
    """The regions of one graph module, as its code was generated."""

    def __init__(self, graph_module: GraphModule) -> None:
        self.forward = type(graph_module).forward
        self.regions: dict[tuple[str, str], RunningRegion] = {}
        if not _is_edited(graph_module):
            self.regions = {region.key: RunningRegion(region.key) for region in regions_of(graph_module)}


def _is_edited(graph_module: GraphModule) -> bool:
    """Return whether a graph was changed since its code was generated."""
    return bool(graph_module.graph.python_code("self").src != graph_module.code)


_RUNNING: weakref.WeakKeyDictionary[nn.Module, _Running] = weakref.WeakKeyDictionary()


def run_region(graph_module: nn.Module, first: str, last: str, *values: Any) -> tuple[Any, ...] | None:
    """Return the outputs of a region by its program, or None where its nodes are to be run one by one.

    Code that `FuseRegions` generates calls it. One by one is how it goes for inputs of a kind that comes for the first
    time; where something differentiates, watches or traces; for anything but float32 on a CPU; and when a module or a
    tensor of the region was changed, exchanged, or given a hook, until a new program is made.

    Args:
        graph_module: the module whose code calls it.
        first: name of the region's first node.
        last: name of its last one.
        values: its inputs.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not runs_plainly():
        return None
    running = _RUNNING.get(graph_module)
    if not isinstance(graph_module, GraphModule):
        return None
    if running is None or running.forward is not type(graph_module).forward:
        running = _RUNNING[graph_module] = _Running(graph_module)
    region = running.regions.get((first, last))
    return None if region is None else region.run(graph_module, values)


def programs_of(graph_module: GraphModule) -> list[Callable[..., Any]]:
    """Return the programs that a graph module has at present."""
    running = _RUNNING.get(graph_module)
    regions = [] if running is None else running.regions.values()
    return [program for region in regions for program in region.programs]


def _kind_of(values: tuple[Any, ...]) -> tuple[object, ...] | None:
    """Return what a program is made for, besides weights; None where none would be."""
    kind: list[object] = [torch.get_num_threads()]
    for value in values:
        if type(value) is Tensor:
            if value.dtype is not _float or not value.is_cpu or value.layout is not _strided:
                return None
            kind += (value.shape, value.stride())
        elif type(value) in (int, float, bool):
            kind += (type(value), value.hex() if type(value) is float else value)  # 0.0 is not -0.0
        else:
            return None
    return tuple(kind)
