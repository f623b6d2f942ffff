"""Which nodes can be one program: runs of operations whose results depend on shapes and values of tensors alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt_cpu.layers.packed_conv import PackedConv2d
from fxopt_cpu.layers.packed_layer import HOOKS, PackedLayer
from fxopt_cpu.passes.memory_formats import CHANGES_STRIDES, CHOOSES_STRIDES, PRESERVES_FORMAT, reads_sizes
from fxopt_rewrite import GraphIndex, is_python_number, read_operation
from fxopt_rewrite.toolbox import Region

_FEWEST_LAYERS = 3  # fewer linear layers gain less than it costs to check that nothing has changed
_KNOWN = PRESERVES_FORMAT | CHANGES_STRIDES | CHOOSES_STRIDES | {"view", "view_as", "_unsafe_view"}


def regions_of(graph_module: GraphModule) -> Iterator[Region]:
    """Yield the regions of a graph, in order; linear in the number of nodes.

    >>> from fxopt_cpu import FuseConvolutions
    >>> model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(), nn.Conv2d(1, 1, 1)).eval()
    >>> graph_module = FuseConvolutions()(torch.fx.symbolic_trace(model))
    >>> [[node.name for node in region.nodes] for region in regions_of(graph_module)]
    [['_0_packed', '_2'], ['_4_packed']]
    """
    index = GraphIndex(graph_module)
    if not any(isinstance(module, PackedLayer) for module in index.modules.values()):
        return
    run: dict[Node, bool] = {}
    for node in index.nodes:
        if _is_fusible(index, node, run):
            run[node] = _owns_memory(index, node, run)
            continue
        if node.op in ("placeholder", "get_attr") and not run:
            continue
        yield from _region(index, tuple(run))
        run = {}


def _region(index: GraphIndex, nodes: tuple[Node, ...]) -> Iterator[Region]:
    packed = [module for module in map(index.module_of, nodes) if isinstance(module, PackedLayer)]
    # Between residual sums, as in encoders, linear layers take so long that a program gains nothing on them.
    pays = len(packed) >= _FEWEST_LAYERS and not any(map(_joins_tensors, nodes))
    if not pays and not any(isinstance(module, PackedConv2d) for module in packed):
        return
    region = Region.of(nodes)
    if region.outputs:
        yield region


def _joins_tensors(node: Node) -> bool:
    return sum(not is_python_number(value) for value in node.all_input_nodes) > 1


def _is_fusible(index: GraphIndex, node: Node, run: dict[Node, bool]) -> bool:
    """Return whether a node depends on its inputs and tensors alone, and only writes to memory of the run."""
    if node.op == "get_attr":
        value = index.attribute_of(node)
        return isinstance(value, Tensor) and _is_dense(value) and not index.effects.tensor_written(value)
    if node.op not in ("call_function", "call_method", "call_module"):
        return False
    module = index.module_of(node)
    if isinstance(module, PackedLayer):
        return _is_bare(module) and all(parameter.dtype is torch.float32 for parameter in module.parameters())
    effect = index.effects.effect(node)
    if reads_sizes(node, effect.operation) or is_python_number(node):
        numbers = (value for value in node.all_input_nodes if not is_python_number(value))
        return reads_sizes(node, effect.operation) or not any(numbers)
    if effect.opaque or effect.operation is None or effect.operation.removesuffix("_") not in _KNOWN:
        return False
    if not _is_known_use(index, node):
        return False
    if module is not None and (module.training or not _is_bare(module) or any(module.children())):
        return False
    return all(run.get(value, False) for value in effect.writes)


def _is_known_use(index: GraphIndex, node: Node) -> bool:
    """Return whether result sizes follow from input sizes, and oneDNN Graph supports this form of the operation."""
    call = read_operation(index, node)
    if call is None or call.module is not None:
        return True
    if call.name == "getitem":
        parts = call.arguments["index"]
        return all(map(_is_basic, parts if isinstance(parts, tuple) else (parts,)))
    if call.name == "where":
        return "other" in call.arguments
    # An operation that oneDNN Graph does not support keeps it from fusing the whole region.
    needed = {"mean": "keepdim", "max_pool2d": "stride"}.get(call.name)
    return needed is None or bool(call.arguments.get(needed))


def _is_basic(index: object) -> bool:
    """Return whether a part of an index selects the same elements for all values."""
    if isinstance(index, Node):
        return bool(is_python_number(index))
    return index is None or index is Ellipsis or type(index) in (int, slice)


def _owns_memory(index: GraphIndex, node: Node, run: dict[Node, bool]) -> bool:
    """Return whether the memory of a node's value was allocated by the nodes of a run."""
    if isinstance(index.module_of(node), PackedLayer):
        return True
    effect = index.effects.effect(node)
    return node.op != "get_attr" and not effect.opaque and all(run.get(value, False) for value in effect.aliases)


def _is_bare(module: nn.Module) -> bool:
    """Return whether calling a module runs the ``forward`` of its class alone, on dense CPU tensors."""
    attributes = vars(module)
    if "forward" in attributes or any(attributes.get(name) for name in HOOKS):
        return False
    tensors = (*module._parameters.values(), *module._buffers.values())
    return all(tensor is None or _is_dense(tensor) for tensor in tensors)


def _is_dense(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu and tensor.layout is torch.strided
