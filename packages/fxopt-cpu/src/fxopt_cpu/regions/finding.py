"""Find regions: runs of layers that have an operator, with the views and sums between them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fxopt_cpu.layers.attention import MergedAttention, RowAttention
from fxopt_cpu.layers.norms import EmbeddingNorm, SumNorm
from fxopt_cpu.layers.packed_conv import PackedConv1d, PackedConv2d
from fxopt_cpu.layers.panel_linear import PanelLinear
from fxopt_cpu.layers.quantized_conv import QuantizedConv1d, QuantizedConv2d
from fxopt_cpu.passes.layouts import CASTS, SPLITS, STEPS, operation
from fxopt_cpu.passes.matching import is_float
from fxopt_cpu.regions.images import (
    activation_of,
    concatenation_of,
    convolutions_fit,
    enlarged_by,
    group_norm_of,
    is_weight,
    overwriting,
    plain_layer_of,
    pooling_of,
)
from fxopt_rewrite import (
    ConvolutionCall,
    GraphIndex,
    LayerNormCall,
    Region,
    is_plain_module,
    is_python_number,
    read_layer_norm,
    tensor_facts,
)

LAYERS = (PanelLinear, MergedAttention, RowAttention, SumNorm, EmbeddingNorm)
CONVOLUTIONS = (PackedConv1d, PackedConv2d, QuantizedConv1d, QuantizedConv2d)
ELEMENTWISE = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide"}
_MORE_VIEWS = {"squeeze", "movedim", "moveaxis", "t", "mT", "view_as", "expand_as"}
VIEWS = frozenset(STEPS) - {"clone", "contiguous"} | SPLITS | _MORE_VIEWS
VIEW_MODULES = (nn.Flatten, nn.Unflatten)
COPIES = frozenset({"clone", "contiguous"})
SIZES = frozenset({"size", "sym_size", "numel", "nelement", "dim", "ndim", "ndimension", "len"})
CHECK = "_assert_tensor_metadata"  # of a dtype
_FEWEST_LAYERS = 2  # fewer gain less than it costs to check that nothing has changed


def regions_of(graph_module: GraphModule) -> Iterator[Region]:
    """Yield the regions of a graph, in order; linear in the number of nodes.

    >>> from fxopt_cpu import FuseLinears
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4)).eval()
    >>> graph_module = FuseLinears()(torch.fx.symbolic_trace(model))
    >>> [[node.name for node in region.nodes] for region in regions_of(graph_module)]
    [['_0_panels', '_2_panels']]
    """
    index = GraphIndex(graph_module)
    images = convolutions_fit(index)
    if not images and not any(isinstance(module, PanelLinear) for module in index.modules.values()):
        return
    run: list[Node] = []
    for node in index.nodes:
        if _joins(index, node, images):
            run.append(node)
        elif node.op not in ("placeholder", "get_attr") or run:
            yield from _regions(index, run)
            run = []
    yield from _regions(index, run)


def _regions(index: GraphIndex, run: list[Node]) -> Iterator[Region]:
    """Yield the regions of a run: it is cut where a number or a tuple is read outside of it."""
    inside = set(run)
    part: list[Node] = []
    for node in run:
        if _gives_tensor(index, node) or inside.issuperset(node.users):
            part.append(node)
        else:
            yield from _region(index, part)
            part = []
    yield from _region(index, part)


def _region(index: GraphIndex, nodes: list[Node]) -> Iterator[Region]:
    before: list[Node] = []
    while nodes and not (_is_layer(index, nodes[0]) or operation(index, nodes[0]) in COPIES):
        before.append(nodes[0])
        nodes = nodes[1:]
    while nodes and not _is_layer(index, nodes[-1]):
        nodes = nodes[:-1]
    # A size that only the region reads costs more than its plan does with it.
    while nodes and before and operation(index, before[-1]) == "size" and set(before[-1].users) <= set(nodes):
        nodes = [before.pop(), *nodes]
    if sum(_multiplies(index, node) for node in nodes) < _FEWEST_LAYERS:
        return
    region, inside = Region.of(nodes), set(nodes)
    # Trimming may have cut off readers of numbers and tuples.
    if region.outputs and all(_gives_tensor(index, node) or inside.issuperset(node.users) for node in nodes):
        yield region


def _gives_tensor(index: GraphIndex, node: Node) -> bool:
    """Return whether a node's value is a tensor: no number, tuple or size."""
    if tensor_facts(node) is not None:
        return True
    # What is indexed decides: `x.size()[0]` is a number, `x.split(4)[0]` a tensor.
    while (name := operation(index, node)) == "getitem" and isinstance(source := node.args[0], Node):
        if operation(index, source) in SPLITS:
            break
        node = source
    return name not in SPLITS and name != "size" and is_python_number(node) is not True


def _is_layer(index: GraphIndex, node: Node) -> bool:
    return isinstance(index.module_of(node), LAYERS) or norm_of(index, node) is not None or _multiplies(index, node)


def _multiplies(index: GraphIndex, node: Node) -> bool:
    """Return whether a node is a linear layer or a convolution."""
    if isinstance(index.module_of(node), PanelLinear | PackedConv2d):
        return True
    return isinstance(plain_layer_of(index, node), ConvolutionCall)


def norm_of(index: GraphIndex, node: Node) -> LayerNormCall | None:
    """Return the layer norm or RMS norm over the last dimension that a node computes, in any form; else None."""
    call, module = read_layer_norm(index, node), index.module_of(node)
    if not isinstance(call, LayerNormCall) or len(call.normalized_shape) != 1:
        return None
    plain = module is None or (type(module) in (nn.LayerNorm, nn.RMSNorm) and is_plain_module(module))
    return call if plain else None


def _joins(index: GraphIndex, node: Node, images: bool) -> bool:
    """Return whether a node's results depend only on its inputs and tensors, and a plan may contain it."""
    of_images = pooling_of, activation_of, group_norm_of, enlarged_by, plain_layer_of
    if norm_of(index, node) is not None or (images and any(read(index, node) for read in of_images)):
        return True
    if node.op == "get_attr":
        return is_weight(index.attribute_of(node))
    module = index.module_of(node)
    is_view = isinstance(module, VIEW_MODULES) and len(node.args) == 1 and is_plain_module(module)
    if module is not None and not is_view:
        # By exact class: a subclass may have its own `forward`.
        return type(module) in (*LAYERS, *(CONVOLUTIONS if images else ())) and is_plain_module(module)
    if node.op not in ("call_function", "call_method", "call_module"):
        return False
    name = operation(index, node)
    if is_python_number(node) is True:
        read = {operation(index, each) for each in node.all_input_nodes if is_python_number(each) is not True}
        # Of tensors, only sizes: values of a plan have other strides and places than those of the nodes.
        return not index.effects.effect(node).opaque and (read <= {"size"} or name in SIZES)
    if overwriting(index, node) in ELEMENTWISE:
        return _is_plain_sum(node)
    if index.effects.aliases(node) and index.effects.written_between(node, node, index.nodes[-1]):
        return False  # a plan would give a copy, which the write does not reach
    if is_view or name == "size" or concatenation_of(index, node) is not None:
        return True
    if name in ELEMENTWISE:
        return _is_plain_sum(node)
    if name == CHECK or name in CASTS:  # of float32 to float32
        source = node.args[0] if node.args else None
        return isinstance(source, Node) and is_float(source) and (name == CHECK or is_float(node))
    memory = node.kwargs.get("memory_format", torch.contiguous_format)
    usual = memory in (torch.contiguous_format, torch.preserve_format)
    return name in VIEWS or (name in COPIES and (usual or (images and memory is torch.channels_last)))


def _is_plain_sum(node: Node) -> bool:
    return len(node.args) == 2 and dict(node.kwargs) in ({}, {"alpha": 1})
