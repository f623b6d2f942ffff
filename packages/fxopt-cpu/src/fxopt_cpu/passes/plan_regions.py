"""``h(g(f(x)))`` -> ``run(x, plan)``: consecutive layers run as one operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import GraphModule
from torch.fx.graph import CodeGen

from fxopt_core import ExportCodeGen, PyTreeCodeGen, ReversibleTransformation
from fxopt_cpu.library import isa
from fxopt_cpu.regions.finding import regions_of
from fxopt_cpu.regions.running import run_plan
from fxopt_rewrite import Branching, Region, is_branching, start_branching, stop_branching


class PlanRegions(ReversibleTransformation):
    """``h(g(f(x)))`` -> ``run(x, plan)``: consecutive layers run as one operator.

    The graph keeps its nodes and modules; only its generated code changes: it first requests the plan of a region.
    A plan lists the operators of the region with the places of all values in one piece of memory. It is made for one
    kind of input (shapes, strides, dtypes, numbers), when that kind first arrives and after any change of a weight or
    a module; making it takes about as long as the region itself. With hooks, or when gradients are needed, the nodes
    run one by one.

    A region is a run of nodes with at least two packed products (`FuseLinears`, `FuseConvolutions`), attention,
    norms, and the views and sums between them; on images also batch norms, pools, activations, concatenations,
    nearest-neighbour resizing, and convolutions that share their modules. Graphs without a region stay unchanged.

    Source:
        The executors of TensorFlow Lite and onnxruntime plan memory in the same way: by the lifetimes of values.

    Cost:
        Some kilobytes for each of at most 512 kinds of input.

    >>> import torch
    >>> from fxopt_cpu import FuseLinears
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).eval()
    >>> print(PlanRegions()(FuseLinears()(torch.fx.symbolic_trace(model))).code.strip())
    def forward(self, input):
        input_1 = input
        outputs = run_plan(self, '_0_panels', '_1_panels', input_1)
        if outputs is not None:
            _1_panels, = outputs;  outputs = input_1 = None
        else:
            _0_panels = getattr(self, "0_panels")(input_1);  input_1 = None
            _1_panels = getattr(self, "1_panels")(_0_panels);  _0_panels = None
        return _1_panels
    """

    preserves_computation = True
    replaces_code_generator = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Let the generated code request plans, and mark the first node of each region."""
        graph = graph_module.graph
        regions = [] if isa() is None or is_branching(graph, Planning) else list(regions_of(graph_module))
        # In the code: modules for regions would change the keys, and `recompile` would replace a custom `forward`.
        if regions and start_branching(graph, _PLANNING):
            for region in regions:
                self.mark_as_transformed(region.nodes[0])
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Let the generated code run node by node."""
        for node in self.get_transformed_nodes(graph_module):
            self.mark_as_restored(node)
        if is_branching(graph_module.graph, Planning):
            stop_branching(graph_module.graph)
        return graph_module


class Planning(Branching):
    """Code that requests plans."""

    @classmethod
    def regions_of(cls, graph_module: GraphModule) -> Iterator[Region]:
        """Yield the regions of a graph, in order."""
        return regions_of(graph_module)

    @classmethod
    def runner(cls) -> Callable[..., Any]:
        """Return `run_plan`."""
        return run_plan


class PlanningCodeGen(Planning, CodeGen):
    """For traced graphs."""

    stands_for = CodeGen


class PlanningPyTreeCodeGen(Planning, PyTreeCodeGen):
    """For graphs with nested inputs or outputs."""

    stands_for = PyTreeCodeGen


class PlanningExportCodeGen(Planning, ExportCodeGen):
    """For exported graphs."""

    stands_for = ExportCodeGen


_PLANNING = {cls.stands_for: cls for cls in (PlanningCodeGen, PlanningPyTreeCodeGen, PlanningExportCodeGen)}
