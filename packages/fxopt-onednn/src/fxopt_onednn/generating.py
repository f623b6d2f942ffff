"""Code generators of graphs that ask for the program of a region first, and run its nodes where there is none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen, PythonCode, _ExportCodeGen, _Namespace, _PyTreeCodeGen

from fxopt_onednn.fusible import Region, regions_of
from fxopt_onednn.running import run_region

_PLACE = re.compile(r"# COUNTER: (\d+)\n")  # how torch marks where the code of a node begins


class _Fusing:
    """What the generators have in common."""

    def _gen_python_code(
        self, nodes: Any, root_module: str, namespace: _Namespace, *args: Any, **options: Any
    ) -> PythonCode:
        """Generate the code, with a branch for each region around that of its nodes."""
        plain = unfused(self)
        owner = nodes.graph.owning_module
        regions = list(regions_of(owner)) if isinstance(owner, GraphModule) and owner.graph is nodes.graph else []
        if not regions or root_module != "self":
            return plain._gen_python_code(nodes, root_module, namespace, *args, **options)
        function, result = namespace.create_name("run_region", run_region), namespace.create_name("outputs", None)
        writer = _Writer(list(nodes), regions, function, result)
        users = plain._body_transformer

        def written(body: list[str]) -> list[str]:
            return writer.written(body if users is None else users(body))

        plain._body_transformer = written
        code = plain._gen_python_code(nodes, root_module, namespace, *args, **options)
        code.globals[function] = run_region
        return code


class FusingCodeGen(_Fusing, CodeGen):
    """For graphs that were traced."""

    stands_for = CodeGen


class FusingPyTreeCodeGen(_Fusing, _PyTreeCodeGen):
    """For graphs that take or give nested containers."""

    stands_for = _PyTreeCodeGen


class FusingExportCodeGen(_Fusing, _ExportCodeGen):
    """For graphs whose inputs are put into order first."""

    stands_for = _ExportCodeGen


_FUSING = {cls.stands_for: cls for cls in (FusingCodeGen, FusingPyTreeCodeGen, FusingExportCodeGen)}


def can_fuse(graph: Graph) -> bool:
    """Return whether there is a code generator for a graph that runs regions of it."""
    return type(graph._codegen) in _FUSING or is_fusing(graph)


def is_fusing(graph: Graph) -> bool:
    """Return whether a graph's code generator is one that runs regions of it."""
    return isinstance(graph._codegen, _Fusing)


def fuse(graph: Graph) -> None:
    """Give a graph the code generator that runs regions of it."""
    graph.set_codegen(_as(_FUSING[type(graph._codegen)], graph._codegen))


def unfused(codegen: Any) -> CodeGen:
    """Return the code generator that a graph had before."""
    return _as(codegen.stands_for, codegen)


def _as(cls: Any, codegen: CodeGen) -> CodeGen:
    twin: CodeGen = cls.__new__(cls)
    vars(twin).update(vars(codegen))
    return twin


class _Writer:
    """Puts the code of regions into branches."""

    def __init__(self, nodes: Sequence[Node], regions: Sequence[Region], function: str, result: str) -> None:
        place = {node: number for number, node in enumerate(nodes)}
        self._function, self._result = function, result
        self._first = {place[region.nodes[0]]: region for region in regions}
        self._after = {place[region.nodes[-1]] + 1 for region in regions}
        self._place = place

    def written(self, body: list[str]) -> list[str]:
        """Return the lines of a function with branches."""
        written: list[str] = []
        inside: list[str] | None = None
        for line in body:
            marked = _PLACE.fullmatch(line)
            number = None if marked is None else int(marked.group(1))
            if number in self._after and inside is not None:
                written.append(_indented(inside))
                inside = None
            (written if inside is None else inside).append(line)
            if number in self._first:
                written.append(self._branch(self._first[number]))
                inside = []
        return written

    def _branch(self, region: Region) -> str:
        """Return the lines before those of a region's nodes."""
        first, last = region.key
        inputs = "".join(f", {node!r}" for node in region.inputs)
        outputs = "".join(f"{node!r}, " for node in region.outputs)
        end = self._place[region.nodes[-1]]
        done = [repr(node) for node in region.inputs if all(self._place[user] <= end for user in node.users)]
        return (
            f"{self._result} = {self._function}(self, {first!r}, {last!r}{inputs})\n"
            f"if {self._result} is not None:\n"
            f"    {outputs}= {self._result};  {' = '.join([self._result, *done])} = None\n"
            "else:\n"
        )


def _indented(lines: list[str]) -> str:
    text = "".join(lines)
    return "".join(f"    {line}" if line.strip() else line for line in text.splitlines(keepends=True))
