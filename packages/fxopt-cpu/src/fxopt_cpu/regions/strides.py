"""The strides that the nodes of a region would give their values, so that a plan gives its outputs the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg

from fxopt_cpu._torch import is_channels_last
from fxopt_cpu.layers.packed_conv import PackedConv2d
from fxopt_cpu.operators.plan import need
from fxopt_cpu.passes.layouts import CASTS, operation
from fxopt_cpu.regions.finding import CHECK, LAYERS, norm_of
from fxopt_cpu.regions.images import group_norm_of, plain_layer_of
from fxopt_rewrite import BatchNormCall, GraphIndex, Region

_FORMATS = {False: torch.contiguous_format, True: torch.channels_last}


def layouts_of(
    index: GraphIndex, region: Region, values: Sequence[Any], made: Mapping[Node, Any]
) -> Mapping[Node, Any]:
    """Return the values of a region as eager mode strides them, on the device `meta`.

    Args:
        index: facts about the graph.
        region: the region.
        values: its inputs.
        made: what a plan makes of its nodes: their shapes are known.
    """
    found: dict[Node, Any] = {
        node: _on_meta(value) if isinstance(value, Tensor) else value
        for node, value in zip(region.inputs, values, strict=True)
    }
    for node in region.nodes:
        found[node] = _layout(index, node, found, made[node])
    return found


def homes_of(region: Region, found: Mapping[Node, Any], made: Mapping[Node, Any]) -> dict[int, Node]:
    """Return the node that has made what lies in each storage; of those that write in place, the last."""
    homes: dict[int, Node] = {}
    for node in (*region.inputs, *region.nodes):
        if isinstance(found[node], Tensor):
            home = homes.setdefault(storage_of(found[node]), node)
            if found[node] is found[home] and made[node] is not made[home]:
                homes[storage_of(found[node])] = node
    return homes


def storage_of(layout: Tensor) -> int:
    """Return what layouts of values that share memory have in common."""
    return int(layout.untyped_storage()._cdata)


def order_of(layout: Tensor) -> list[int]:
    """Return the order in which a value's dimensions lie in memory.

    >>> order_of(torch.empty(2, 3, 4, 5, device="meta").to(memory_format=torch.channels_last))
    [0, 2, 3, 1]
    """
    order = sorted(range(layout.dim()), key=layout.stride().__getitem__, reverse=True)
    need(layout.permute(order).is_contiguous())
    return order


def called(call: Node | nn.Module, args: Any, kwargs: Any) -> Any:
    """Return what a module, or the function or method of a node, gives."""
    if isinstance(call, Node) and call.op == "call_method":
        return getattr(args[0], str(call.target))(*args[1:], **kwargs)
    target: Any = call.target if isinstance(call, Node) else call
    return target(*args, **kwargs)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _layout(index: GraphIndex, node: Node, found: Mapping[Node, Any], made: Any) -> Any:
    args: Any = map_arg(node.args, found.__getitem__)
    kwargs: Any = map_arg(node.kwargs, found.__getitem__)
    module = index.module_of(node)
    if node.op == "get_attr":
        return _on_meta(index.attribute_of(node))  # type: ignore[arg-type]  # regions read nothing else
    if isinstance(module, PackedConv2d):
        if module.dims == 1:
            # In eager mode, torch's `conv1d` gives contiguous results; in a sum, the other value decides as well.
            return sum(args[1:], torch.empty(made.shape, device="meta"))
        weight = torch.empty_strided(module.weight_shape, module.holder.strides("weight"), device="meta")
        # As in torch, a convolution gives channels-last results if its input or its weight is channels last.
        follows = module.memory_format == "preserve" and (is_channels_last(args[0]) or is_channels_last(weight))
        last = follows or module.memory_format == "channels_last"
        return torch.empty(made.shape, device="meta", memory_format=_FORMATS[last])
    if isinstance(module, LAYERS):
        return torch.empty(made.shape, device="meta")
    norm = norm_of(index, node)
    if norm is not None:
        return (F.layer_norm if norm.centred else F.rms_norm)(found[norm.input], norm.normalized_shape)
    grouped = group_norm_of(index, node)
    if grouped is not None:
        last = grouped.groups is not None and is_channels_last(found[grouped.input])
        return torch.empty(made.shape, device="meta", memory_format=_FORMATS[last])
    plain = plain_layer_of(index, node)
    if isinstance(plain, BatchNormCall):
        input = found[plain.input]
        statistics = torch.empty(input.shape[1], device="meta")
        return F.batch_norm(input, statistics, statistics)
    if plain is not None:
        images = plain.dims == 2  # over one dimension, torch makes results contiguous
        last = images and (is_channels_last(found[plain.input]) or is_channels_last(plain.weight.tensor))
        return torch.empty(made.shape, device="meta", memory_format=_FORMATS[last])
    if module is not None:  # a pool, an activation or a view
        return module(*args, **kwargs)
    if isinstance(made, int | float) or (isinstance(made, tuple) and all(isinstance(each, int) for each in made)):
        return made
    # The casts and checks in a region return their input.
    return args[0] if operation(index, node) in (*CASTS, CHECK) else called(node, args, kwargs)
