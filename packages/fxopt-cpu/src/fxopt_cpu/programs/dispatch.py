"""Which calls of a region run as one program: those of a known kind, while nothing has changed since it was made."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_cpu.layers.packed_layer import runs_by_onednn
from fxopt_cpu.programs.fusible import regions_of
from fxopt_cpu.programs.programs import Program, make_program
from fxopt_cpu.programs.unchanged import Unchanged
from fxopt_rewrite import on_refresh
from fxopt_rewrite.toolbox import is_edited

_MOST_PROGRAMS = 4
_MOST_KINDS = 64
_float, _strided = torch.float32, torch.strided


class RegionPrograms:
    """The programs of a region, by kind of input: shapes, strides, numbers, and the number of threads.

    The first one is made when a kind of input arrives for the second time. Each further one takes twice as many calls,
    so that making programs takes little time even if kinds hardly repeat, or weights keep changing.
    """

    def __init__(self, key: tuple[str, str]) -> None:
        self._key = key  # not the nodes, which would keep the graph module alive
        self._made = 0
        self.forget()

    def forget(self) -> None:
        """Drop all programs."""
        self._ready: tuple[Unchanged | None, dict[tuple[object, ...], Program | None]] = (None, {})
        self._seen: dict[tuple[object, ...], int] = {}

    @property
    def programs(self) -> list[Program]:
        """The current programs."""
        return [program for program in self._ready[1].values() if program is not None]

    def run(self, graph_module: GraphModule, values: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the outputs for inputs, or None if the nodes have to run one by one."""
        kind = _kind_of(values)
        if kind is None:
            return None
        unchanged, programs = self._ready
        if unchanged is not None and not unchanged.holds():
            self.forget()
            return None
        if kind not in programs:
            self._count(graph_module, kind, values)
            programs = self._ready[1]
        program = programs.get(kind)
        return None if program is None else program(*(value for value in values if type(value) is Tensor))

    def _count(self, graph_module: GraphModule, kind: tuple[object, ...], values: tuple[Any, ...]) -> None:
        """Count a kind of input; make its program if it has arrived often enough."""
        if len(self._seen) >= _MOST_KINDS:
            self._seen.clear()
        seen = self._seen[kind] = self._seen.get(kind, 0) + 1
        if seen > 1 << min(self._made, 20):
            self._made += 1
            self._make(graph_module, kind, values)

    def _make(self, graph_module: GraphModule, kind: tuple[object, ...], values: tuple[Any, ...]) -> None:
        if is_edited(graph_module):
            return
        try:
            region = next(region for region in regions_of(graph_module) if region.key == self._key)
            unchanged = Unchanged(graph_module, region.nodes)
        except (StopIteration, AttributeError, KeyError, RuntimeError):  # something is gone, or tensors have no version
            return
        program = make_program(graph_module, region, values) if unchanged.holds() else None
        if not unchanged.holds():
            return
        if len(self.programs) >= _MOST_PROGRAMS:
            self.forget()
        self._ready = unchanged, {**self._ready[1], kind: program}
        if program is not None:  # it has its own packed weights
            unchanged.release_packed()


_Regions = tuple[Callable[..., Any], dict[tuple[str, str], RegionPrograms]]
# The programs of the regions of each graph module, and the generated ``forward`` that they belong to.
_REGIONS: weakref.WeakKeyDictionary[nn.Module, _Regions] = weakref.WeakKeyDictionary()


def run_region(graph_module: nn.Module, first: str, last: str, *values: Any) -> tuple[Any, ...] | None:
    """Return the outputs of a region's program, or None if its nodes have to run one by one.

    The code that `FuseRegions` generates calls it with the module, the names of the region's first and last node, and
    its inputs. The nodes run one by one for a kind of input that arrives for the first time, under autograd, tracing
    and modes, for anything but float32 on a CPU, and after a module or a tensor of the region has been changed,
    replaced, or given a hook, until a new program is made.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not runs_by_onednn():
        return None
    if not isinstance(graph_module, GraphModule):
        return None
    forward, programs = _REGIONS.get(graph_module, (None, {}))
    if forward is not type(graph_module).forward:
        regions = () if is_edited(graph_module) else regions_of(graph_module)
        programs = {region.key: RegionPrograms(region.key) for region in regions}
        _REGIONS[graph_module] = type(graph_module).forward, programs
    region = programs.get((first, last))
    return None if region is None else region.run(graph_module, values)


@on_refresh
def _forget_programs(module: nn.Module) -> None:
    """Drop the programs of all graph modules in a model."""
    for each in module.modules():
        for region in _REGIONS.get(each, (None, {}))[1].values():
            region.forget()


def programs_of(graph_module: GraphModule) -> list[Callable[..., Any]]:
    """Return the current programs of a graph module."""
    _, regions = _REGIONS.get(graph_module, (None, {}))
    return [program for region in regions.values() for program in region.programs]


def _kind_of(values: tuple[Any, ...]) -> tuple[object, ...] | None:
    """Return what a program depends on besides weights; None for inputs that programs do not take."""
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
