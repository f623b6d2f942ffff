"""Inline what a model runs under ``torch.no_grad``, so that passes see the layers there.

``torch.export`` makes a graph within the graph of it. Where no gradient could flow into the region, its nodes do the
same outside of it. Elsewhere they do if their results are detached, unless the region writes to a tensor from outside:
autograd would then record the write. A view of a tensor from outside stays in its region too: autograd knows of it.

``y = no_grad(region)(x)`` -> ``y = region(x).detach()``
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from fxopt_core.graph import iter_nodes

aten = torch.ops.aten
_MAY_RETURN_INPUT = frozenset({"aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::type_as"})


def inline_regions(graph: Graph, root: nn.Module) -> None:
    """Inline the regions that the model runs under ``torch.no_grad``, where that changes nothing.

    Args:
        graph: the graph, changed in place.
        root: where the modules that its ``get_attr`` nodes name are found.
    """
    reached = _GradientReach()
    for node in iter_nodes(graph):
        region = _gradient_free_region(node, root)
        if region is None or any(inner.op == "get_attr" for inner in iter_nodes(region.graph)):
            continue  # what a region within it is called would be looked for in the root
        operands = node.args[2:]
        detached = any(isinstance(operand, Node) and reached(operand) for operand in operands)
        if not detached or _keeps_to_itself(region.graph):
            _inline(graph, node, region, operands, detached=detached)


def _gradient_free_region(node: Node, root: nn.Module) -> GraphModule | None:
    if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled or node.args[0] is not False:
        return None
    source = node.args[1]
    region = getattr(root, str(source.target), None) if isinstance(source, Node) else None
    return region if isinstance(region, GraphModule) else None


def _inline(graph: Graph, node: Node, region: GraphModule, operands: tuple[object, ...], *, detached: bool) -> None:
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
        if detached:
            for output in dict.fromkeys(outputs):
                if isinstance(output, Node) and output.op != "placeholder" and _differentiable(output):
                    copies[output] = _detached(graph, copies[output])
    for user in list(node.users):
        index = user.args[1]
        if not isinstance(index, int):
            raise TypeError(f"node {user.name} reads a region's results by {index!r}, which is no index")
        user.replace_all_uses_with(copies[outputs[index]])
        graph.erase_node(user)
    graph.erase_node(node)


def _detached(graph: Graph, node: Node) -> Node:
    result = graph.call_function(aten.detach.default, (node,))
    result.meta = dict(node.meta)
    return result


def _keeps_to_itself(graph: Graph) -> bool:
    """Whether a region neither writes to nor views tensors from outside that gradients could flow into."""
    results = [result for node in iter_nodes(graph) if node.op == "output" for result in node.all_input_nodes]
    seen = [result for result in results if result.op != "placeholder"]
    written = [tensor for node in iter_nodes(graph) for tensor in _written(node)]
    return all(_is_own(tensor) for tensor in (*seen, *written) if _differentiable(tensor))


def _written(node: Node) -> list[Node]:
    """Return the arguments that a node writes to."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    arguments = node.target._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, node.args, strict=False)} | node.kwargs
    writes = [argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write]
    values = pytree.tree_leaves([given.get(name) for name in writes])
    return [value for value in values if isinstance(value, Node)]


def _is_own(node: Node) -> bool:
    """Whether a tensor, and what it is a view of, was made within its graph."""
    while node.op != "placeholder":
        if not isinstance(node.target, torch._ops.OpOverload) or not node.all_input_nodes:
            return isinstance(node.target, torch._ops.OpOverload)
        schema = node.target._schema
        if not any(result.alias_info is not None for result in schema.returns) and schema.name not in _MAY_RETURN_INPUT:
            return True
        node = node.all_input_nodes[0]  # the first argument is what views are of, and what is written to
    return False


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
