"""Make an exported graph read like the model: no leftovers of the export, attributes where they are used."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from fxopt_core.graph import iter_nodes

from .assertions import drop_assertions

aten = torch.ops.aten


def tidy(graph: Graph, root: nn.Module) -> None:
    """Remove what the export has added and what does nothing.

    - values that nothing reads go, where computing them has no other effect;
    - dropout that does not train is its input;
    - a region without gradients, into which none flow anyway, is inlined;
    - assertions on dtypes that cannot change go.

    Args:
        graph: the graph, changed in place.
        root: where the modules that its ``get_attr`` nodes name are found.
    """
    inline_gradient_free_regions(graph, root)
    for node in iter_nodes(graph):
        if node.target is aten.dropout.default and not _trains(node):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
    drop_assertions(graph)
    graph.eliminate_dead_code(is_impure_node=_has_effect)


def _has_effect(node: Node) -> bool:
    """Whether a node does more than to compute its value: in-place writes, random numbers, running statistics."""
    if node.is_impure():
        return True
    if node.target is aten.batch_norm.default:
        return bool(node.args[5])
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _trains(node: Node) -> bool:
    train = node.kwargs.get("train", node.args[2] if len(node.args) > 2 else True)
    return bool(train)


def place_attributes(graph: Graph) -> None:
    """Erase the ``get_attr`` nodes that nothing reads and move the others before their first reader."""
    placed: set[Node] = set()
    for node in iter_nodes(graph):
        if node.op == "get_attr":
            if not node.users:
                graph.erase_node(node)
            continue
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in placed:
                placed.add(source)
                node.prepend(source)


def inline_gradient_free_regions(graph: Graph, root: nn.Module) -> None:
    """Inline the regions that the model runs under ``torch.no_grad`` where no operand can need a gradient."""
    reached = _GradientReach()
    for node in iter_nodes(graph):
        region = _gradient_free_region(node, root)
        operands = node.args[2:] if region is not None else ()
        if region is None or any(isinstance(operand, Node) and reached(operand) for operand in operands):
            continue
        _inline(graph, node, region, operands)


def _gradient_free_region(node: Node, root: nn.Module) -> GraphModule | None:
    if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled or node.args[0] is not False:
        return None
    source = node.args[1]
    region = getattr(root, str(source.target), None) if isinstance(source, Node) else None
    return region if isinstance(region, GraphModule) else None


def _inline(graph: Graph, node: Node, region: GraphModule, operands: tuple[object, ...]) -> None:
    placeholders = [inner for inner in iter_nodes(region.graph) if inner.op == "placeholder"]
    copies: dict[Node, Any] = dict(zip(placeholders, operands, strict=True))
    results: Any = ()
    with graph.inserting_before(node):
        for inner in iter_nodes(region.graph):
            if inner.op == "output":
                results = inner.args[0]
            elif inner.op != "placeholder":
                copies[inner] = graph.node_copy(inner, copies.__getitem__)
    outputs = results if isinstance(results, list | tuple) else [results]
    for user in list(node.users):
        index = user.args[1]
        if not isinstance(index, int):
            raise TypeError(f"node {user.name} reads a region's results by {index!r}, which is no index")
        user.replace_all_uses_with(copies[outputs[index]])
        graph.erase_node(user)
    graph.erase_node(node)


class _GradientReach:
    """Whether a gradient could flow into a value, now or after the user has asked for one.

    It could into floating-point inputs and parameters, frozen ones too, and into what is computed from them.
    """

    def __init__(self) -> None:
        self.known: dict[Node, bool] = {}

    def __call__(self, node: Node) -> bool:
        stack = [node]
        while stack:
            current = stack[-1]
            unknown = [source for source in self._sources(current) if source not in self.known]
            if unknown and current not in self.known:
                stack.extend(unknown)
                continue
            self.known.setdefault(current, self._reached(current))
            stack.pop()
        return self.known[node]

    def _sources(self, node: Node) -> list[Node]:
        return [] if self._is_source(node) or not _differentiable(node) else node.all_input_nodes

    def _is_source(self, node: Node) -> bool:
        return node.op in ("placeholder", "get_attr")

    def _reached(self, node: Node) -> bool:
        if not _differentiable(node):
            return False
        if node.op == "get_attr":
            value = node.meta.get("val")
            return isinstance(value, nn.Parameter) or (isinstance(value, torch.Tensor) and value.requires_grad)
        return node.op == "placeholder" or any(self.known[source] for source in node.all_input_nodes)


def _differentiable(node: Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.dtype.is_floating_point or value.dtype.is_complex
    return not isinstance(value, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool)
