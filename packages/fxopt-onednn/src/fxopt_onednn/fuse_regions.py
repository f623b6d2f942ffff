"""``h(g(f(x)))`` -> ``program(x)``: layers that follow each other run as one program of oneDNN Graph."""

from __future__ import annotations

from torch.fx import GraphModule

from fxopt_core import ReversibleTransformation
from fxopt_onednn.fusible import regions_of
from fxopt_onednn.generating import can_fuse, fuse, is_fusing, unfused


class FuseRegions(ReversibleTransformation):
    """``h(g(f(x)))`` -> ``program(x)``: layers that follow each other run as one program of oneDNN Graph.

    The graph keeps its nodes and its modules; what changes is how it is run. Its code asks for the program of a region
    first. When inputs of one kind (shapes, strides, number of threads) come for the second time, the region is recorded
    by TorchScript, fused by oneDNN Graph, compared with its layers in result and time, and then run so. Otherwise, and
    as soon as anything about it has changed (a weight, a module, a hook, gradients that are asked for), its nodes run
    one by one.

    A region is a run of nodes with a packed convolution in it, all of which depend on nothing but shapes and tensors.
    In graphs without one nothing is changed.

    Source:
        ``torch.jit.enable_onednn_fusion``: oneDNN Graph prepares a kernel for each group of operations once, and lets
        images lie between groups as its kernels like them.

    Cost:
        The program holds packed weights of its own, for each of at most four kinds of input. Making one takes as long
        as some ten to thirty runs of the model.

    >>> import torch
    >>> from fxopt_onednn import PackConvolutions
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.ReLU()).eval()
    >>> print(FuseRegions()(PackConvolutions()(torch.fx.symbolic_trace(model))).code.strip())
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
        """Let the graph's code ask for programs, and mark the first node of each region."""
        graph = graph_module.graph
        regions = list(regions_of(graph_module)) if can_fuse(graph) else []
        if regions and not is_fusing(graph):
            fuse(graph)
            for region in regions:
                self.mark_as_transformed(region.nodes[0])
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Let the graph's code run node by node."""
        for node in self.get_transformed_nodes(graph_module):
            self.mark_as_restored(node)
        if is_fusing(graph_module.graph):
            graph_module.graph.set_codegen(unfused(graph_module.graph._codegen))
        return graph_module
