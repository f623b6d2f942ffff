"""``h(g(f(x)))`` -> ``program(x)``: consecutive layers run as one oneDNN Graph program."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen, PythonCode

from fxopt_core import ReversibleTransformation
from fxopt_core._torch import (
    ExportCodeGen,
    Namespace,
    PyTreeCodeGen,
    codegen_of,
    generator_class,
    python_code,
    with_class,
)
from fxopt_onednn.fuse_regions.dispatch import run_region
from fxopt_onednn.fuse_regions.fusible import Region, regions_of

_PLACE = re.compile(r"# COUNTER: (\d+)\n")  # torch marks the first line of each node like this


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
        """Let the generated code ask for programs, and mark the first node of each region."""
        graph = graph_module.graph
        regions = [] if is_fusing(graph) else list(regions_of(graph_module))
        if regions and fuse(graph):
            for region in regions:
                self.mark_as_transformed(region.nodes[0])
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Let the generated code run node by node."""
        for node in self.get_transformed_nodes(graph_module):
            self.mark_as_restored(node)
        if is_fusing(graph_module.graph):
            unfuse(graph_module.graph)
        return graph_module


class _Fusing:
    """Mixed into torch's code generators."""

    stands_for: type[CodeGen]  # which of them; read by `fxopt_core._torch.generator_class`

    def _gen_python_code(
        self, nodes: Any, root_module: str, namespace: Namespace, *args: Any, **options: Any
    ) -> PythonCode:
        """Generate the code, with each region in a branch."""
        plain = with_class(self, self.stands_for)  # type: ignore[arg-type]  # mixed into one
        owner = nodes.graph.owning_module
        regions = list(regions_of(owner)) if isinstance(owner, GraphModule) and owner.graph is nodes.graph else []
        if not regions or root_module != "self":
            return python_code(plain, nodes, root_module, namespace, *args, **options)
        function, result = namespace.create_name("run_region", run_region), namespace.create_name("outputs", None)
        edit = _branching(list(nodes), regions, function, result)
        code = python_code(plain, nodes, root_module, namespace, *args, edit=edit, **options)
        code.globals[function] = run_region
        return code


class FusingCodeGen(_Fusing, CodeGen):
    """For traced graphs."""

    stands_for = CodeGen


class FusingPyTreeCodeGen(_Fusing, PyTreeCodeGen):
    """For graphs with nested inputs or outputs."""

    stands_for = PyTreeCodeGen


class FusingExportCodeGen(_Fusing, ExportCodeGen):
    """For exported graphs."""

    stands_for = ExportCodeGen


_FUSING = {cls.stands_for: cls for cls in (FusingCodeGen, FusingPyTreeCodeGen, FusingExportCodeGen)}


def is_fusing(graph: Graph) -> bool:
    """Return whether a graph's code generator asks for programs of regions."""
    return isinstance(codegen_of(graph), _Fusing)


def fuse(graph: Graph) -> bool:
    """Give a graph a code generator that asks for programs; return whether there is one of its kind."""
    codegen = codegen_of(graph)
    if type(codegen) not in _FUSING:
        return False
    graph.set_codegen(with_class(codegen, _FUSING[type(codegen)]))
    return True


def unfuse(graph: Graph) -> None:
    """Give a graph the code generator that it had before `fuse`."""
    graph.set_codegen(with_class(codegen_of(graph), generator_class(graph)))


def _branching(
    nodes: Sequence[Node], regions: Sequence[Region], function: str, result: str
) -> Callable[[list[str]], list[str]]:
    """Return a function that puts the lines of each region into a branch."""
    place = {node: number for number, node in enumerate(nodes)}
    first = {place[region.nodes[0]]: region for region in regions}
    after = {place[region.nodes[-1]] + 1 for region in regions}

    def branched(body: list[str]) -> list[str]:
        written: list[str] = []
        inside: list[str] | None = None
        for line in body:
            marked = _PLACE.fullmatch(line)
            number = None if marked is None else int(marked.group(1))
            if number in after and inside is not None:
                written.append(_indented(inside))
                inside = None
            (written if inside is None else inside).append(line)
            if number in first:
                written.append(_branch(first[number], place, function, result))
                inside = []
        return written

    return branched


def _branch(region: Region, place: dict[Node, int], function: str, result: str) -> str:
    """Return the lines that begin a region."""
    first, last = region.key
    inputs = "".join(f", {node!r}" for node in region.inputs)
    outputs = "".join(f"{node!r}, " for node in region.outputs)
    end = place[region.nodes[-1]]
    done = [repr(node) for node in region.inputs if all(place[user] <= end for user in node.users)]
    return (
        f"{result} = {function}(self, {first!r}, {last!r}{inputs})\n"
        f"if {result} is not None:\n"
        f"    {outputs}= {result};  {' = '.join([result, *done])} = None\n"
        "else:\n"
    )


def _indented(lines: list[str]) -> str:
    text = "".join(lines)
    return "".join(f"    {line}" if line.strip() else line for line in text.splitlines(keepends=True))
