"""Typed walks over a graph."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.fx import Graph, Node
from torch.fx.graph import CodeGen


def iter_nodes(graph: Graph) -> Iterator[Node]:
    """Yield the nodes of a graph in order, typed.

    ``for node in graph.nodes`` is typed ``Any`` in torch, so that a type checker sees nothing inside such a loop.
    Nodes may be erased or inserted while walking, as with ``graph.nodes``.

    >>> import torch
    >>> graph = torch.fx.symbolic_trace(torch.nn.ReLU()).graph
    >>> [node.op for node in iter_nodes(graph)]
    ['placeholder', 'call_function', 'output']
    """
    yield from graph.nodes


def generator_class(graph: Graph) -> type[CodeGen]:
    """Return the class of a graph's code generator, or that of torch which it says that it stands for.

    A pass may change how a graph is run by a generator of its own, derived from torch's, whose class attribute
    ``stands_for`` names that one: inputs and outputs are the same.

    >>> import torch
    >>> generator_class(torch.fx.symbolic_trace(torch.nn.ReLU()).graph).__name__
    'CodeGen'
    """
    cls = type(graph._codegen)
    stands_for: type[CodeGen] = getattr(cls, "stands_for", cls)
    return stands_for


class TargetNodes:
    """The ``call_module`` and ``get_attr`` nodes of a graph by what they name, kept up while the graph is edited.

    ``Graph.find_nodes`` walks all nodes of that kind each time.

    >>> import torch
    >>> targets = TargetNodes(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU())).graph)
    >>> [str(node) for node in targets.of("call_module", "0")], targets.of("get_attr", "0")
    (['_0'], [])
    """

    def __init__(self, graph: Graph) -> None:
        self._nodes: dict[tuple[str, str], dict[Node, None]] = {}
        for node in iter_nodes(graph):
            self.add(node)

    def add(self, node: Node) -> None:
        """Take notice of a node that was put in."""
        if node.op in ("call_module", "get_attr"):
            self._nodes.setdefault((node.op, str(node.target)), {})[node] = None

    def discard(self, node: Node) -> None:
        """Take notice of a node that was taken out."""
        if node.op in ("call_module", "get_attr"):
            self._nodes.get((node.op, str(node.target)), {}).pop(node, None)

    def of(self, op: str, target: str) -> list[Node]:
        """Return the nodes with this operation that name this module or attribute."""
        return list(self._nodes.get((op, target), ()))


def modules_by_name(root: nn.Module) -> dict[str, nn.Module]:
    """Return a module and those below it by full name, in torch's order; one under two names stands twice.

    >>> list(modules_by_name(nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU()))))
    ['', '0', '1', '1.0']
    """
    found: dict[str, nn.Module] = {}
    waiting: list[tuple[str, nn.Module]] = [("", root)]
    while waiting:
        name, module = waiting.pop()
        found[name] = module
        if module._modules:
            prefix = f"{name}." if name else ""
            children = [(f"{prefix}{key}", child) for key, child in module._modules.items() if child is not None]
            waiting += reversed(children)
    return found


def identities(root: nn.Module) -> Iterator[int]:
    """Yield the identity of every module and tensor once for each of its names."""
    for _, module in root.named_modules(remove_duplicate=False):
        yield id(module)
        yield from (id(tensor) for tensor in (*module._parameters.values(), *module._buffers.values()))
