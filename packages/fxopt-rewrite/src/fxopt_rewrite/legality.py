"""Legality checks for passes: whether anything else uses tensors or values, or writes them."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.fx import Node

from fxopt_core import Refusal
from fxopt_rewrite.calls.records import ParameterisedCall
from fxopt_rewrite.index import GraphIndex


def tensors_refusal(call: ParameterisedCall, index: GraphIndex) -> Refusal | None:
    """Return why the tensors of a call may not be rewritten: adapters, tied tensors, several names, in-place writes."""
    refusal = _adapter_refusal(call, index)
    if refusal is not None:
        return refusal
    if call.module is not None and len(names := index.module_names(call.module)) > 1:
        message = f"module `{call.label}` has several names: {', '.join(f'`{name}`' for name in names)}"
        return index.refuse(call.label, "shared-module", message, call.node)
    for ref in call.tensors:
        if index.is_tied(ref.tensor):
            others = [name for name in index.tensor_names(ref.tensor) if name != ref.name]
            other = f"`{others[0]}`" if others else "another tensor, whose memory it shares"
            message = f"`{ref.name}` of `{call.label}` is tied to {other}; rewriting it would untie them"
            return index.refuse(call.label, "tied-parameter", message, call.node)
        if index.effects.tensor_written(ref.tensor):
            message = f"`{ref.name}` of `{call.label}` is written in place in the graph"
            return index.refuse(call.label, "mutated", message, call.node)
    return None


def _adapter_refusal(call: ParameterisedCall, index: GraphIndex) -> Refusal | None:
    """Return why a layer with an adapter, found by PEFT's names, or a layer of an adapter has to stay."""
    names = (call.weight.name if call.weight is not None else call.label).split(".")
    # PEFT puts the layer at `q.base_layer`, and the adapter beside it, at `q.lora_A.default`.
    for place, name in enumerate(names):
        owner = index.modules.get(".".join(names[:place])) if name == "base_layer" or name.startswith("lora_") else None
        if owner is None or "base_layer" not in owner._modules:
            continue
        others = [other for other in (*owner._modules, *owner._parameters) if other != "base_layer"]
        if others:
            attached = f"adapter `{others[0]}` is attached to `{'.'.join((*names[:place], 'base_layer'))}`"
            return index.refuse(call.label, "adapter", f"{attached}, so that `{call.label}` stays as it is", call.node)
    return None


def sharing_refusal(call: ParameterisedCall, nodes: Collection[Node], index: GraphIndex) -> Refusal | None:
    """Return why a call may not be rewritten: nodes other than these read its tensors."""
    allowed = set(nodes)
    for ref in call.tensors:
        for reader in index.readers(ref.tensor):
            if reader not in allowed:
                calls = call.module is not None and index.module_of(reader) is call.module
                reason = "shared-module" if calls else "tied-parameter"
                use = "called" if calls else f"read (its `{ref.key}`)"
                message = f"`{call.label}` is also {use} at node `{reader.name}`; rewriting it would change that"
                return index.refuse(call.label, reason, message, *nodes)
    return None


def mixed_flags_refusal(site: str, calls: Collection[ParameterisedCall], index: GraphIndex) -> Refusal | None:
    """Return why calls may not be merged: some of their parameters are frozen and some are trainable.

    Buffers are neither.
    """
    refs = [ref for call in calls for ref in (call.weight, call.bias) if ref is not None]
    named = {ref.tensor.requires_grad: ref.name for ref in reversed(refs) if isinstance(ref.tensor, nn.Parameter)}
    if len(named) < 2:
        return None
    message = f"`{named[False]}` is frozen and `{named[True]}` is trainable; one tensor cannot be both"
    return index.refuse(site, "mixed-requires-grad", message, *(call.node for call in calls))


def replacement_refusal(site: str, node: Node, index: GraphIndex, *values: Node) -> Refusal | None:
    """Return why the readers of a node may not read a new tensor with the same contents, computed from these values.

    The caller may notice it if the graph returns the node's value, or a tensor that shares its memory. A later write to
    the node's value or to one of these values would reach only one of the two memories.

    >>> import torch
    >>> def copies(x):
    ...     return x.clone(), x.clone() * 2
    >>> index = GraphIndex(torch.fx.symbolic_trace(copies))
    >>> x, returned, inner, *_ = index.nodes
    >>> replacement_refusal("clone", returned, index, x).reason, replacement_refusal("clone_1", inner, index, x)
    ('returned', None)
    """
    if index.is_returned(node):
        message = f"the value of node `{node.name}`, or a view of it, is returned"
        return index.refuse(site, "returned", message, node)
    for value in (node, *values):
        if index.is_written_after(value, since=node):
            message = f"`{value.name}` is written after node `{node.name}`, or a global mode changes there"
            return index.refuse(site, "mutated", message, node)
    return None
