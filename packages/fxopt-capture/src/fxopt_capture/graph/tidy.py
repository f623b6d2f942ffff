"""Make an exported graph read like the model: no leftovers of the export, attributes where they are used."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import Graph, Node

from fxopt_capture.graph.assertions import drop_assertions
from fxopt_capture.graph.regions import inline_regions
from fxopt_core import iter_nodes

aten = torch.ops.aten
_ARITHMETIC = ("_operator", "operator", "math", "builtins")


def tidy(graph: Graph, root: nn.Module) -> None:
    """Remove leftovers of the export and calls without effect.

    - values that nothing reads are erased, if computing them has no other effect;
    - dropout in eval mode is replaced by its input;
    - a region without gradients is inlined, and its results are detached if gradients could flow into it;
    - assertions on dtypes that cannot change are erased.
    """
    inline_regions(graph, root)
    for node in iter_nodes(graph):
        if node.target is aten.dropout.default:
            trains = node.kwargs.get("train", node.args[2] if len(node.args) > 2 else True)
            if not trains:
                node.replace_all_uses_with(node.all_input_nodes[0])
                graph.erase_node(node)
    drop_assertions(graph)
    # From the end, so that a value is erased after the last call that reads it.
    for node in reversed(list(iter_nodes(graph))):
        if not node.users and not _has_effect(node):
            graph.erase_node(node)


def _has_effect(node: Node) -> bool:
    """Return whether a node does more than compute its value: in-place writes, random numbers, running statistics.

    A function that is neither an operator nor arithmetic may enter or leave a context, such as a level of
    ``torch.vmap``, that other nodes rely on even if nothing reads its value.
    """
    if node.target is aten.copy_.default and len(node.all_input_nodes) == 2:
        table, moved = node.all_input_nodes
        if moved.target is aten.to.device and moved.args[0] is table:  # `self.table = self.table.to(device)`
            return bool(moved.meta["val"].dtype != table.meta["val"].dtype)
    if node.is_impure():
        return True
    if node.target is aten.batch_norm.default:
        # Input, weight, bias, mean, variance, training: statistics are written in training only.
        return bool(node.args[5])
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags or not node.target._schema.returns
    return node.op == "call_function" and not _is_arithmetic(node.target)


def _is_arithmetic(function: object) -> bool:
    """Return whether a function that is not an operator computes with numbers and sizes, or runs a nested graph."""
    module, name = str(getattr(function, "__module__", "")), str(getattr(function, "__name__", ""))
    is_number = module in _ARITHMETIC or "sym_" in name or module.startswith("torch.fx.experimental")
    return is_number or isinstance(function, torch._ops.HigherOrderOperator)


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
