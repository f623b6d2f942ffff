"""Drop the assertions on dtypes that cannot fail; keep those that say what a graph is valid for.

``torch.export`` asserts the dtype and device of whatever the model converts. It has a reason: ``x.to(device)`` and
``x.to(y.dtype)`` are in the graph with the dtype of the capture, so that after ``graph_module.double()`` they would
silently convert back. But where the dtype cannot change at all (a mask, positions, the result of another conversion),
the assertion is in the way of reading the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.fx import Graph, Node

from fxopt_capture.call.guards import InputGuards
from fxopt_core.graph import iter_nodes

aten = torch.ops.aten
_CONVERSIONS = frozenset({aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default})


def drop_assertions(graph: Graph) -> None:
    """Erase the assertions about tensors whose dtype follows neither from parameters nor from inputs."""
    settled: set[Node] = set()
    for node in iter_nodes(graph):
        if node.target is aten._assert_tensor_metadata.default:
            if node.all_input_nodes[0] in settled:
                graph.erase_node(node)
        elif _is_settled(node, settled):
            settled.add(node)


def with_asserted_dtypes(guards: InputGuards, graph: Graph) -> InputGuards:
    """Return guards that also refuse what a graph's assertions on the dtypes of its inputs do, but say what to do.

    The assertions stay in the graph, as they are about devices too.
    """
    dtypes: dict[Node, torch.dtype] = {}
    for node in iter_nodes(graph):
        dtype = node.kwargs.get("dtype")
        if node.target is aten._assert_tensor_metadata.default and isinstance(dtype, torch.dtype):
            dtypes[node.all_input_nodes[0]] = dtype
    placeholders = [node for node in iter_nodes(graph) if node.op == "placeholder"]
    specs = [
        replace(spec, dtype=dtypes[node], read_at=None, follows=False) if spec.kind and node in dtypes else spec
        for spec, node in zip(guards.specs, placeholders, strict=True)
    ]
    return InputGuards(specs, guards.conditions, guards.mode, guards.module_dtype)


def with_read_dtypes(
    guards: InputGuards, values: Sequence[object], reads: Mapping[str, str], model: nn.Module
) -> InputGuards:
    """Return guards that also refuse other dtypes of a kind that the model reads, as the graph has them as constants.

    Args:
        guards: those of the graph's inputs, in order.
        values: what its placeholders hold in ``meta["val"]``.
        reads: kind of dtype -> where the model reads one.
        model: the model; inputs in its dtype may follow the graph module to another one.
    """
    tensors = (*model.parameters(), *model.buffers())
    own = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
    specs = [
        replace(spec, dtype=value.dtype, read_at=reads[spec.kind], follows=value.dtype == own)
        if spec.kind is not None and spec.kind in reads and isinstance(value, torch.Tensor)
        else spec
        for spec, value in zip(guards.specs, values, strict=True)
    ]
    return InputGuards(specs, guards.conditions, guards.mode, own)


def _is_settled(node: Node, settled: set[Node]) -> bool:
    """Whether a value has the same dtype whatever ``graph_module.to(dtype)`` and the caller do."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not (value.dtype.is_floating_point or value.dtype.is_complex):
        return True
    if node.op != "call_function":
        return False
    if node.target in _CONVERSIONS:
        return True
    tensors = (source for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor))
    return all(source in settled for source in tensors)
