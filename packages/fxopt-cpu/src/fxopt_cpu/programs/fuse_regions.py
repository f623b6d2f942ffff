"""``h(g(f(x)))`` -> ``program(x)``: consecutive layers run as one oneDNN Graph program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import GraphModule
from torch.fx.graph import CodeGen

from fxopt_core import ReversibleTransformation
from fxopt_core.toolbox import ExportCodeGen, PyTreeCodeGen
from fxopt_cpu.programs.dispatch import run_region
from fxopt_cpu.programs.fusible import regions_of
from fxopt_rewrite.toolbox import Branching, Region, is_branching, start_branching, stop_branching


class FuseRegions(ReversibleTransformation):
    """``h(g(f(x)))`` -> ``program(x)``: consecutive layers run as one oneDNN Graph program.

    The graph keeps its nodes and modules; only its generated code changes, which asks for the program of a region
    first. The second time that inputs of one kind (shapes, strides, number of threads) arrive, TorchScript records the
    region, oneDNN Graph fuses it, and the program is used from then on if its results match those of the layers and it
    is faster. Otherwise, and after any change (of a weight, a module or a hook, or when gradients are needed), the
    nodes run one by one.

    A region is a run of nodes whose results depend on shapes and tensors alone, and that includes a packed convolution,
    or at least three packed linear layers and no operation of two tensors: in encoders, with their residual sums, a
    program gains nothing. Graphs without a region stay unchanged.

    Source:
        ``torch.jit.enable_onednn_fusion``: oneDNN Graph prepares one kernel for each group of operations, and chooses
        the memory format of images between groups.

    Cost:
        A program has its own packed weights, for each of at most four kinds of input. Making one takes as long as ten
        to thirty runs of the model.

    >>> import torch
    >>> from fxopt_cpu import FuseConvolutions
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.ReLU()).eval()
    >>> print(FuseRegions()(FuseConvolutions()(torch.fx.symbolic_trace(model))).code.strip())
    def forward(self, input):
        input_1 = input
        outputs = run_region(self, '_0_packed', '_0_packed', input_1)
        if outputs is not None:
            _0_packed, = outputs;  outputs = input_1 = None
        else:
            _0_packed = getattr(self, "0_packed")(input_1);  input_1 = None
        return _0_packed
    """

    preserves_computation = True
    replaces_code_generator = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Let the generated code ask for programs, and mark the first node of each region."""
        graph = graph_module.graph
        regions = [] if is_branching(graph, Fusing) else list(regions_of(graph_module))
        if regions and start_branching(graph, _FUSING):
            for region in regions:
                self.mark_as_transformed(region.nodes[0])
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Let the generated code run node by node."""
        for node in self.get_transformed_nodes(graph_module):
            self.mark_as_restored(node)
        if is_branching(graph_module.graph, Fusing):
            stop_branching(graph_module.graph)
        return graph_module


class Fusing(Branching):
    """Code that asks for oneDNN Graph programs."""

    @classmethod
    def regions_of(cls, graph_module: GraphModule) -> Iterator[Region]:
        """Yield the regions of a graph, in order."""
        return regions_of(graph_module)

    @classmethod
    def runner(cls) -> Callable[..., Any]:
        """Return `run_region`."""
        return run_region


class FusingCodeGen(Fusing, CodeGen):
    """For traced graphs."""

    stands_for = CodeGen


class FusingPyTreeCodeGen(Fusing, PyTreeCodeGen):
    """For graphs with nested inputs or outputs."""

    stands_for = PyTreeCodeGen


class FusingExportCodeGen(Fusing, ExportCodeGen):
    """For exported graphs."""

    stands_for = ExportCodeGen


_FUSING = {cls.stands_for: cls for cls in (FusingCodeGen, FusingPyTreeCodeGen, FusingExportCodeGen)}
