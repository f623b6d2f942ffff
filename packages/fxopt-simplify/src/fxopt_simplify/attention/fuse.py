"""``softmax(q @ k.T * scale + mask) @ v`` -> ``scaled_dot_product_attention(q, k, v, mask, scale)``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import Node

from fxopt_core import Refusal
from fxopt_rewrite import (
    MISSING,
    Editor,
    GraphIndex,
    ReversibleSitePass,
    TensorFacts,
    argument,
    read_operation,
    same_sizes,
    tensor_facts,
    trains,
)
from fxopt_simplify.attention.reader import FLOATS, Attention, AttentionReader, Mask, is_last_transpose
from fxopt_simplify.known_values import Bounds

_PACKING = ("contiguous", "clone", "reshape", "flatten")


class FuseScaledDotProductAttention(ReversibleSitePass[Attention]):
    """``softmax(q @ k.T * scale + mask) @ v`` -> ``scaled_dot_product_attention(q, k, v, mask, scale)``.

    q is (..., L, E), k (..., S, E), v (..., S, V) and the mask broadcasts to (..., L, S). The scores may be multiplied
    or divided by a number; masks are summands, or filled in with the smallest number of the dtype. Keys and values of
    grouped heads stay expanded as they are. Results are the same in float32 and float64 except for rounding,
    as long as the scores are finite. Gradients are those of torch's kernels: only first derivatives, and on CPUs wrong
    ones for rows that the smallest number hides entirely, so that masks that may do so are refused in train mode.

    Refused if the weights are read elsewhere, for active dropout, in half precision (where the kernel rounds less), and
    for masks that may be ``-inf``: where they hide a whole row, the softmax gives NaN, and the kernel zeros.

    Source:
        Dao et al., FlashAttention, https://arxiv.org/abs/2205.14135, algorithm 1: the same sums, without scores in
        memory.

    Cost:
        One call instead of four to seven, and (..., L, S) fewer values in memory. No tensor of the model is touched.
        The pass is linear in the number of nodes.

    >>> class Attention(torch.nn.Module):
    ...     def forward(self, q, k, v):
    ...         return torch.softmax(q @ k.transpose(-2, -1) / 4, dim=-1) @ v
    >>> from fxopt_rewrite import infer_shapes
    >>> traced = infer_shapes(torch.fx.symbolic_trace(Attention()), *torch.ones(3, 1, 2, 5, 16))
    >>> graph_module = FuseScaledDotProductAttention()(traced)
    >>> [str(node.target.__name__) for node in graph_module.graph.nodes if node.op == "call_function"]
    ['scaled_dot_product_attention', 'clone']
    """

    reasons: ClassVar[Mapping[str, str]] = {
        "masked-rows": "The mask may hide a whole row by -inf, for which a softmax gives NaN and the fused call zeros. "
        "Mask with torch.finfo(dtype).min instead.",
        "other-attention": "The scores are computed as scaled_dot_product_attention does not: filled with another "
        "number, with a mask of fewer dimensions or more rows, or with a softmax over another dimension. Nothing to "
        "do: they are part of the model.",
        "unsupported-dtype": "The layer has a dtype that the operators do not take. Convert it: `model.float()`.",
    }

    def match(self, index: GraphIndex) -> Iterator[Attention | Refusal]:
        """Yield the attentions of the graph."""
        reader = AttentionReader(index)
        for node in index.nodes:
            found = reader.read(node)
            if found is not None:
                yield found

    def check(self, site: Attention, index: GraphIndex) -> Refusal | None:
        """Refuse unknown shapes, half precision, masks of whole rows, and values written in between."""
        reason, message = next(_obstacles(site, index), ("", ""))
        return index.refuse(site.label, reason, message, *site.nodes) if reason else None

    def rewrite(self, site: Attention, edit: Editor) -> None:
        """Call the fused operation in place of the last product, and take out what only it used."""
        scores, product, reader = site.scores, site.product, AttentionReader(edit.index)
        masks = [_summand(mask, site, edit) for mask in scores.masks]
        mask, before = masks[0] if masks else None, _place_of_masks(site, edit)
        for other in masks[1:]:
            added = edit.call_function(torch.add, mask, other, before=before, like=[scores.masks[-1].node])
            mask = edit.undescribed(added)
        inputs = (scores.query, _keys(site, edit), site.value)
        options: dict[str, Any] = {} if mask is None else {"attn_mask": mask}
        target = F.scaled_dot_product_attention
        fused = edit.call_function(target, *inputs, before=product, like=[product], scale=scores.scale, **options)
        edit.undescribed(fused)
        # A product of matrices is contiguous; the result of torch's kernel may have other strides.
        if not _is_packed_next(product, reader):
            form = torch.contiguous_format
            fused = edit.call_function(torch.clone, fused, memory_format=form, before=product, like=[product])
        else:
            (user,) = product.users
            while reader.name(user) in ("transpose", "permute"):  # whose strides are others now
                edit.restrided(user)
                (user,) = user.users
        edit.replace(product, fused)
        for node in site.between:
            for check in reader.checks(node):
                edit.erase(check)
            edit.erase(node)
            edit.drop_unused(node)
        if not scores.keys.users and not edit.is_stale([scores.keys]) and reader.name(scores.keys):
            edit.erase(scores.keys)


def _keys(site: Attention, edit: Editor) -> Node:
    """Return the keys as they were before their transpose, or transposed back."""
    keys, facts = site.scores.keys, tensor_facts(site.scores.keys)
    call = read_operation(edit.index, keys)
    if facts is not None and call is not None and call.input is not None and is_last_transpose(call, facts.rank):
        return call.input
    return edit.undescribed(edit.call_function(torch.transpose, keys, -2, -1, before=site.product, like=[keys]))


def _summand(mask: Mask, site: Attention, edit: Editor) -> Node:
    """Return a mask as a summand: the number that it fills in where it is true, and zeros."""
    if mask.fill is None:
        return mask.value
    before, like, fill = site.product, [mask.node], site.values.number(mask.fill)
    zero = edit.undescribed(edit.call_method("new_zeros", site.scores.query, (), before=before, like=like))
    return edit.undescribed(edit.call_function(torch.where, mask.value, fill, zero, before=before, like=like))


def _place_of_masks(site: Attention, edit: Editor) -> Node:
    """Return the node before which masks are added up: early, so that nothing lies between the layers that attend."""
    values = [mask.value for mask in site.scores.masks]  # of known bounds, so that nothing writes them later
    if not values or any(mask.fill is not None for mask in site.scores.masks) or edit.is_stale(values):
        return site.product
    place = max(values, key=edit.index.position.__getitem__).next
    while place.op == "placeholder":  # parameters may be read before them
        place = place.next
    return place


def _is_packed_next(product: Node, reader: AttentionReader) -> bool:
    """Return whether the next reader joins the heads in new memory, whatever their strides are."""
    users = list(product.users)
    while len(users) == 1 and reader.name(users[0]) in ("transpose", "permute"):
        users = list(users[0].users)
    if len(users) != 1 or (name := reader.name(users[0])) not in _PACKING or users[0].op == "call_module":
        return False
    if name in ("reshape", "flatten"):  # a copy where they join heads and size, and else perhaps a view
        before, after = tensor_facts(product), tensor_facts(users[0])
        joined = before.shape[1] * before.shape[3] if before is not None and before.rank == 4 else None
        return after is not None and type(joined) is int and after.shape[-1] == joined
    given = argument(users[0], None, "memory_format")
    return given is torch.contiguous_format or (given is MISSING and name != "clone")  # which keeps the strides


def _obstacles(site: Attention, index: GraphIndex) -> Iterator[tuple[str, str]]:
    """Yield why an attention is left alone: codes and messages."""
    made = (site.product.meta.get("from_node") or [None])[-1]
    # Otherwise, the two passes would undo each other's work in turn.
    if getattr(made, "pass_name", "") == "fuse-attention":
        message = f"`{site.label}` was one call before, for which torch has no fast kernel, and is written out"
        yield "other-attention", message
    yield from _unfit_shapes(site)
    scores, first = site.scores, site.scores.calls[-1]
    reads = [(scores.query, first), (scores.keys, first), *((mask.value, mask.node) for mask in scores.masks)]
    for value, reader in reads:
        if index.effects.written_between(value, reader, site.product):
            message = f"`{value.name}` is written in place, or a mode changes, before node `{site.label}` reads it"
            yield "mutated", message
    yield from _unfit_masks(site, index)


def _unfit_shapes(site: Attention) -> Iterator[tuple[str, str]]:
    scores = site.scores
    nodes = (scores.query, scores.keys, site.value, *site.nodes, *(m.value for m in scores.masks if m.fill is None))
    facts: dict[Node, TensorFacts] = {}
    for node in nodes:
        if (found := tensor_facts(node)) is None:
            yield "shape-unknown", f"shape and dtype of `{node.name}` are unknown; call infer_shapes first"
            return
        facts[node] = found
    dtype = facts[scores.query].dtype
    for node, found in facts.items():
        # In half precision, the graph rounds the scores, and the fused kernel does not.
        if found.dtype != dtype or dtype not in FLOATS:
            message = f"node `{node.name}` of the attention is {found.dtype}; all have to be float32, or float64"
            yield "unsupported-dtype", message
    ranks = [facts[node].rank for node in (scores.query, scores.keys, site.value)]
    if len(set(ranks)) > 1 or ranks[0] < 3:
        message = f"queries, keys and values of `{site.label}` have {ranks} dimensions; all need the same, at least 3"
        yield "other-attention", message
    before, after = facts[scores.calls[-1]].shape, facts[scores.calls[0]].shape
    if not same_sizes(before, after):
        message = f"a mask of `{site.label}` has more rows than the scores, {tuple(after)} and not {tuple(before)}"
        yield "other-attention", message


def _unfit_masks(site: Attention, index: GraphIndex) -> Iterator[tuple[str, str]]:
    facts, total = tensor_facts(site.scores.query), Bounds(0.0, 0.0)
    assert facts is not None
    smallest = torch.finfo(facts.dtype).min
    for mask in site.scores.masks:
        shape = tensor_facts(mask.value)
        if shape is None or shape.rank < 2:
            yield "other-attention", f"`{mask.value.name}` masks the scores, and has fewer than two dimensions"
        fill = None if mask.fill is None else site.values.number(mask.fill)
        if mask.fill is not None and fill not in (-float("inf"), smallest):
            message = f"node `{mask.node.name}` fills in `{mask.fill}`, which is not the smallest {facts.dtype}"
            yield "other-attention", message
        # Together: two masks of the smallest number add up to -inf where both hide.
        total = total.plus(site.values.bounds(mask.value) if fill is None else Bounds(fill, 0.0))
        if not total.fit(facts.dtype):
            yield "masked-rows", f"`{mask.value.name}` may mask a whole row of the scores of `{site.label}` by -inf"
    if total.low < smallest / 2 and trains(index, site.product, ""):
        yield "training", f"masks of `{site.label}` may hide whole rows, whose gradients the kernel gets wrong"
