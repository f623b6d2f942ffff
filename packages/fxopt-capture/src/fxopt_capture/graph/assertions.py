"""Drop the assertions on dtypes that cannot fail; keep those that state what a graph is valid for.

``torch.export`` asserts the dtype and device of every tensor that the model converts. The reason: ``x.to(device)`` and
``x.to(y.dtype)`` are in the graph with the dtype of the capture, so after ``graph_module.double()`` they would silently
convert back. But if the dtype cannot change at all (a mask, positions, the result of another conversion), the assertion
only makes the graph harder to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.fx import Graph, Node

from fxopt_capture.call.guards import InputGuards
from fxopt_core import iter_nodes

aten = torch.ops.aten
_CONVERSIONS = frozenset({aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default})


def drop_assertions(graph: Graph) -> None:
    """Erase the assertions about tensors whose dtype follows neither from parameters nor from inputs.

    Assertions about tensors that are only converted to dtypes other than their own are erased, too: the model must have
    asked for these.
    """
    settled: set[Node] = set()
    for node in iter_nodes(graph):
        if node.target is aten._assert_tensor_metadata.default:
            tensor, dtype = node.all_input_nodes[0], node.kwargs.get("dtype")
            converted = [user for user in tensor.users if user.target in _CONVERSIONS]
            if tensor in settled or (converted and not any(dtype in _constants(user) for user in converted)):
                graph.erase_node(node)
        elif _is_settled(node, settled):
            settled.add(node)


def with_dtypes(
    guards: InputGuards, values: Sequence[object], reads: Mapping[str, str], graph: Graph, model: nn.Module
) -> InputGuards:
    """Return guards that also refuse other dtypes where the graph has those of the capture as constants.

    These are dtypes of a kind that the model reads, and dtypes that the graph asserts of its inputs; the assertions
    stay in the graph, since they check devices too.

    Args:
        guards: the guards of the graph's inputs, in order.
        values: ``meta["val"]`` of its placeholders.
        reads: kind of dtype -> where the model reads one.
        graph: the graph, tidied.
        model: the model; inputs in its dtype may follow the graph module to another one.
    """
    tensors = (*model.parameters(), *model.buffers())
    own = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
    asserted = _asserted(graph)
    placeholders = [node for node in iter_nodes(graph) if node.op == "placeholder"]
    specs = []
    for spec, node, value in zip(guards.specs, placeholders, values, strict=True):
        if spec.kind is not None and node in asserted:
            spec = replace(spec, dtype=asserted[node])
        elif spec.kind is not None and spec.kind in reads and isinstance(value, torch.Tensor):
            spec = replace(spec, dtype=value.dtype, read_at=reads[spec.kind], follows=value.dtype == own)
        specs.append(spec)
    found = [module.baked for module in model.modules() if isinstance(module, InputGuards)]  # captured before
    if own is not None:
        found.append(_baked(graph, own, reads.get("floating")))
    return InputGuards(specs, guards.conditions, guards.mode, own, next(filter(None, found), None))


def _asserted(graph: Graph) -> dict[Node, torch.dtype]:
    """Return the dtypes that a graph asserts."""
    nodes = graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default)
    dtypes = ((node.all_input_nodes[0], node.kwargs.get("dtype")) for node in nodes)
    return {node: dtype for node, dtype in dtypes if isinstance(dtype, torch.dtype)}


def _baked(graph: Graph, own: torch.dtype, read_at: str | None) -> str | None:
    """Describe a constant of a graph that may come from the dtype of the weights, or return None.

    A model that reads no dtype has only fixed dtypes in its graph, except that ``x.to(device)`` has the dtype of ``x``.
    """
    for node, dtype in _asserted(graph).items():
        becomes_own = any(user.target in _CONVERSIONS and own in _constants(user) for user in node.users)
        # The guards check the dtypes of inputs, but not those of values within the graph.
        if dtype.is_floating_point and (becomes_own or node.op != "placeholder"):
            return f"`{node.name}` is converted there as a tensor of {dtype}"
    if read_at is None:
        return None
    # No trace shows whether `torch.float32` was `x.dtype` or a literal, so every constant counts that may come from the
    # dtype of the weights. `-info.max` is there because masks are filled with the lowest number of a dtype.
    info = torch.finfo(own)
    from_own = {own, info.max, -info.max, info.max / 2, -info.max / 2, info.eps, info.tiny}
    for node in iter_nodes(graph):
        for value in _constants(node):
            if isinstance(value, float | torch.dtype) and value in from_own:
                return f"`{node.name}` has {value} in it, perhaps from the dtype that the model reads at {read_at}"
    return None


def _constants(node: Node) -> tuple[object, ...]:
    return (*node.args, *node.kwargs.values())


def _is_settled(node: Node, settled: set[Node]) -> bool:
    """Return whether a value has the same dtype whatever ``graph_module.to(dtype)`` and the caller do."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not (value.dtype.is_floating_point or value.dtype.is_complex):
        return True
    if node.op != "call_function":
        return False
    if node.target in _CONVERSIONS:
        return True
    tensors = (source for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor))
    return all(source in settled for source in tensors)
