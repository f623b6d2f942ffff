"""Regions of a model that are one call in its graph: inline them, or report which layers they hide from passes.

Code that a model runs under ``torch.no_grad`` is such a region. If no gradient could flow into it, its nodes do the
same outside of it. Otherwise they do if their results are detached, unless the region writes to a tensor from outside:
autograd would then record the write. A region that views a tensor from outside is not inlined either: autograd tracks
views.

``y = no_grad(region)(x)`` -> ``y = region(x).detach()``
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from fxopt_capture.graph.shells import attribute
from fxopt_core import iter_nodes

aten = torch.ops.aten
#: By their schemas, these make a new tensor. They return the input itself where there is nothing to do: dropout in
#: eval mode, `type_as` for an equal dtype.
_MAY_RETURN_INPUT = frozenset({"aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::type_as"})


def inline_regions(graph: Graph, root: nn.Module) -> None:
    """Inline the regions that the model runs under ``torch.no_grad``, if this changes no result.

    `root` holds the modules that ``get_attr`` nodes of the graph name.
    """
    reached: dict[Node, bool] = {}
    for node in iter_nodes(graph):
        region, made = _gradient_free_region(node, root), [node]
        # The name of a region within the region would be looked up in the root.
        if region is not None and not any(inner.op == "get_attr" for inner in iter_nodes(region.graph)):
            operands = node.args[2:]
            detached = any(isinstance(operand, Node) and reached[operand] for operand in operands)
            if not detached or _keeps_to_itself(region.graph):
                made = _inline(graph, node, region, operands, detached=detached)
        for each in made:
            reached[each] = _is_reached(each, reached)


def _gradient_free_region(node: Node, root: nn.Module) -> GraphModule | None:
    if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled or node.args[0] is not False:
        return None
    source = node.args[1]
    region = getattr(root, str(source.target), None) if isinstance(source, Node) else None
    return region if isinstance(region, GraphModule) else None


def _inline(
    graph: Graph, node: Node, region: GraphModule, operands: tuple[object, ...], *, detached: bool
) -> list[Node]:
    """Put the nodes of a region in its place, and return them."""
    copies: dict[Node, Any] = dict(zip(region.graph.find_nodes(op="placeholder"), operands, strict=True))
    results: Any = region.graph.output_node().args[0]
    outputs = results if isinstance(results, list | tuple) else [results]
    with graph.inserting_before(node):
        graph.graph_copy(region.graph, copies)
        made = [copies[inner] for inner in iter_nodes(region.graph) if inner.op not in ("placeholder", "output")]
        if detached:
            for output in dict.fromkeys(outputs):
                if isinstance(output, Node) and output.op != "placeholder" and _differentiable(output):
                    result = graph.call_function(aten.detach.default, (copies[output],))
                    result.meta = dict(copies[output].meta)
                    copies[output] = result
                    made.append(result)
    for user in list(node.users):
        index = user.args[1]
        if not isinstance(index, int):
            raise TypeError(f"node {user.name} reads a region's results by {index!r}, which is not an index")
        user.replace_all_uses_with(copies[outputs[index]])
        graph.erase_node(user)
    graph.erase_node(node)
    return made


def _keeps_to_itself(graph: Graph) -> bool:
    """Return whether a region neither writes to nor views outside tensors that gradients could flow into."""
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
    """Return whether a tensor, and the base that it is a view of, was made within its graph."""
    while node.op != "placeholder":
        if not isinstance(node.target, torch._ops.OpOverload) or not node.all_input_nodes:
            # An operator without inputs makes a tensor; of attributes and other functions nothing is known.
            return isinstance(node.target, torch._ops.OpOverload)
        schema = node.target._schema
        if not any(result.alias_info is not None for result in schema.returns) and schema.name not in _MAY_RETURN_INPUT:
            return True
        node = node.all_input_nodes[0]  # the first argument is what views are of, and what is written to
    return False


def _is_reached(node: Node, reached: Mapping[Node, bool]) -> bool:
    """Return whether a gradient could flow into a value, now or after the user has asked for one.

    It could flow into floating-point inputs and parameters, even frozen ones, and into values computed from them.
    """
    if not _differentiable(node):
        return False
    if node.op == "get_attr":
        value = node.meta.get("val")
        return isinstance(value, nn.Parameter) or (isinstance(value, torch.Tensor) and value.requires_grad)
    return node.op == "placeholder" or any(reached[source] for source in node.all_input_nodes)


def _differentiable(node: Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.dtype.is_floating_point or value.dtype.is_complex
    return not isinstance(value, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool)


def hidden_note(graph_module: GraphModule) -> str | None:
    """Return a note on the calls of a graph that are regions computing with parameters, or None.

    ``torch.export`` keeps as graphs within the graph: code under ``torch.autocast``, code without gradients that some
    could flow into, and the branches of ``torch.cond`` and similar operators.
    """
    regions = [node for node in iter_nodes(graph_module.graph) if isinstance(node.target, HigherOrderOperator)]
    hiding = {node: found for node in regions if (found := _parameters(node, graph_module))}
    if not hiding:
        return None
    listed = "; ".join(f"`{node.name}` with {', '.join(names)}" for node, names in hiding.items())
    return (
        f"passes see no layers in the regions that the model runs under torch.autocast, torch.no_grad or in branches: "
        f"{listed}. Without that context the layers would be separate calls"
    )


def _parameters(node: Node, graph_module: GraphModule) -> list[str]:
    names = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
    return [name for name in names if isinstance(attribute(graph_module, name), nn.Parameter)]
