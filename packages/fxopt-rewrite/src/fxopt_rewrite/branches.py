"""Generated code that first calls a function for the results of a region, and otherwise runs it node by node.

The graph keeps its nodes and modules; only its code generator is replaced. A family says which nodes form a region, and
provides the function, which is called with the module, the names of the first and last node, and the inputs.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen, PythonCode

from fxopt_core import codegen_of
from fxopt_rewrite._torch import Namespace, generator_class, python_code, with_class

_PLACE = re.compile(r"# COUNTER: (\d+)\n")  # torch marks the first line of each node like this


@dataclass(frozen=True, eq=False)
class Region:
    """Consecutive nodes of a graph whose results one call may return.

    Attributes:
        nodes: the nodes, in order.
        inputs: the values before them that they read.
        outputs: those of them that are read later.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]

    @classmethod
    def of(cls, nodes: Iterable[Node]) -> Region:
        """Return the region of these nodes."""
        given = tuple(nodes)
        inside = set(given)
        inputs = dict.fromkeys(value for node in given for value in node.all_input_nodes if value not in inside)
        outputs = tuple(node for node in given if any(user not in inside for user in node.users))
        return cls(given, tuple(inputs), outputs)

    @property
    def key(self) -> tuple[str, str]:
        """The names of the first and the last node, which identify a region in its graph."""
        return self.nodes[0].name, self.nodes[-1].name


class Branching:
    """Mixed into torch's code generators by a family, once for each of them."""

    #: The generator that it stands in for; read by `fxopt_rewrite._torch.generator_class`.
    stands_for: ClassVar[type[CodeGen]]

    @classmethod
    def regions_of(cls, graph_module: GraphModule) -> Iterator[Region]:
        """Yield the regions of a graph, in order."""
        raise NotImplementedError

    @classmethod
    def runner(cls) -> Callable[..., Any]:
        """Return the function that the code calls; it returns the outputs of a region, or None."""
        raise NotImplementedError

    def _gen_python_code(
        self, nodes: Any, root_module: str, namespace: Namespace, *args: Any, **options: Any
    ) -> PythonCode:
        """Generate the code, with each region in a branch."""
        # Branches are in the generated code: `recompile` would drop a custom `forward`, and a module for each region
        # would change the keys of the state dict.
        plain = with_class(self, self.stands_for)  # type: ignore[arg-type]  # mixed into one
        owner = nodes.graph.owning_module
        mine = isinstance(owner, GraphModule) and owner.graph is nodes.graph
        regions = list(self.regions_of(owner)) if mine else []
        # The branches pass `self` on, which is not there if the code is generated for a root of another name.
        if not regions or root_module != "self":
            return python_code(plain, nodes, root_module, namespace, *args, **options)
        run = self.runner()
        function, result = namespace.create_name(run.__name__, run), namespace.create_name("outputs", None)
        edit = _branching(list(nodes), regions, function, result)
        code = python_code(plain, nodes, root_module, namespace, *args, edit=edit, **options)
        code.globals[function] = run
        return code


def is_branching(graph: Graph, kind: type[Branching]) -> bool:
    """Return whether a graph's code calls a function for the results of regions of this kind."""
    return isinstance(codegen_of(graph), kind)


def start_branching(graph: Graph, generators: Mapping[type[CodeGen], type[Any]]) -> bool:
    """Replace a graph's code generator by its counterpart in ``generators``; return whether there is one."""
    codegen = codegen_of(graph)
    if type(codegen) not in generators:
        return False
    graph.set_codegen(with_class(codegen, generators[type(codegen)]))
    return True


def stop_branching(graph: Graph) -> None:
    """Give a graph the code generator that it had before."""
    graph.set_codegen(with_class(codegen_of(graph), generator_class(graph)))


def is_edited(graph_module: GraphModule) -> bool:
    """Return whether a graph has changed since its code was generated."""
    return bool(graph_module.graph.python_code("self").src != graph_module.code)


def _branching(
    nodes: Sequence[Node], regions: Sequence[Region], function: str, result: str
) -> Callable[[list[str]], list[str]]:
    """Return a function that puts the lines of each region into a branch."""
    place = {node: number for number, node in enumerate(nodes)}
    first = {place[region.nodes[0]]: region for region in regions}
    after = {place[region.nodes[-1]] + 1 for region in regions}

    def branched(body: list[str]) -> list[str]:
        written, indent = list[str](), ""
        for line in body:
            marked = _PLACE.fullmatch(line)
            number = None if marked is None else int(marked.group(1))
            indent = "" if number in after else indent
            # torch splits some lines of code into several entries.
            starts = not written or written[-1].endswith("\n")
            written.append(textwrap.indent(line, indent if starts else ""))
            if number in first:
                written.append(_branch(first[number], place, function, result))
                indent = "    "
        return written

    return branched


def _branch(region: Region, place: dict[Node, int], function: str, result: str) -> str:
    """Return the lines that begin a region."""
    first, last = region.key
    inputs = "".join(f", {node!r}" for node in region.inputs)
    outputs = "".join(f"{node!r}, " for node in region.outputs)
    end = place[region.nodes[-1]]
    # As in torch's code after the last use of a value, so that its memory is freed.
    done = [repr(node) for node in region.inputs if all(place[user] <= end for user in node.users)]
    return (
        f"{result} = {function}(self, {first!r}, {last!r}{inputs})\n"
        f"if {result} is not None:\n"
        f"    {outputs}= {result};  {' = '.join([result, *done])} = None\n"
        "else:\n"
    )
