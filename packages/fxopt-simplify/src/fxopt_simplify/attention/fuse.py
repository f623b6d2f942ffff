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
from fxopt_simplify.attention.masks import Bounds
from fxopt_simplify.attention.reader import FLOATS, Attention, AttentionReader, Mask, is_last_transpose

_PACKING = ("contiguous", "clone", "reshape", "flatten")


class FuseScaledDotProductAttention(ReversibleSitePass[Attention]):
    """``softmax(q @ k.T * scale + mask) @ v`` -> ``scaled_dot_product_attention(q, k, v, mask, scale)``.

    q is (..., L, E), k (..., S, E), v (..., S, V) and the mask broadcasts to (..., L, S). The scores may be multiplied
    or divided by a number; masks are summands, or filled in with ``-inf`` or the smallest number of the dtype. Keys and
    values of grouped heads stay expanded as they are. The same in float32 and float64 except for rounding, as long as
    the scores are finite. Gradients are those of torch's kernels: there are first derivatives only, and on CPUs other
    ones for rows that the smallest number hides entirely, so that masks that may do so are refused in train mode.

    Refused if the weights are read elsewhere, for active dropout, in half precision (where the kernel rounds less), and
    for masks that may hide a whole row by ``-inf``: the softmax gives NaN there, and the kernel zeros.

    Source:
        Dao et al., FlashAttention, https://arxiv.org/abs/2205.14135, algorithm 1: the same sums, without scores in
        memory.

    Cost:
        One call instead of four to seven, and (..., L, S) values fewer in memory. No tensor of the model is touched.
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
        "other-attention": "The scores are computed as scaled_dot_product_attention does not: capped, scaled by a "
        "tensor, filled with another number, or with a softmax over another dimension. Nothing to do: they are part of "
        "the model.",
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
        return _Check(site, index).refusal()

    def rewrite(self, site: Attention, edit: Editor) -> None:
        """Call the fused operation in place of the last product, and take out what only it used."""
        scores, product, reader = site.scores, site.product, AttentionReader(edit.index)
        masks = [_summand(mask, site, edit) for mask in scores.masks]
        mask = masks[0] if masks else None
        for other in masks[1:]:
            mask = edit.undescribed(
                edit.call_function(torch.add, mask, other, before=product, like=[scores.masks[-1].node])
            )
        inputs = (scores.query, _keys(site, edit), site.value)
        options: dict[str, Any] = {} if mask is None else {"attn_mask": mask}
        target = F.scaled_dot_product_attention
        fused = edit.call_function(target, *inputs, before=product, like=[product], scale=scores.scale, **options)
        edit.undescribed(fused)
        if not _is_packed_next(product, reader):
            form = torch.contiguous_format
            fused = edit.call_function(torch.clone, fused, memory_format=form, before=product, like=[product])
        else:
            (user,) = product.users
            while reader.name(user) in ("transpose", "permute"):  # whose strides are others now
                edit.undescribed(user)
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
    """Return a mask as a summand: zeros, and where the mask is true what it fills in."""
    if mask.fill is None:
        return mask.value
    before, like, fill = site.product, [mask.node], site.values.number(mask.fill)
    zero = edit.undescribed(edit.call_method("new_zeros", site.scores.query, (), before=before, like=like))
    return edit.undescribed(edit.call_function(torch.where, mask.value, fill, zero, before=before, like=like))


def _is_packed_next(product: Node, reader: AttentionReader) -> bool:
    """Return whether the heads are brought together in memory of their own next, whatever their strides are."""
    users = list(product.users)
    while len(users) == 1 and reader.name(users[0]) in ("transpose", "permute"):
        users = list(users[0].users)
    if len(users) != 1 or reader.name(users[0]) not in _PACKING or users[0].op == "call_module":
        return False
    return argument(users[0], None, "memory_format") in (MISSING, torch.contiguous_format)


class _Check:
    """The legality of one attention."""

    def __init__(self, site: Attention, index: GraphIndex) -> None:
        self._site, self._index = site, index

    def refusal(self) -> Refusal | None:
        """Return why the attention is left alone, or None."""
        return self._back_refusal() or self._shape_refusal() or self._write_refusal() or self._mask_refusal()

    def _back_refusal(self) -> Refusal | None:
        made = (self._site.product.meta.get("from_node") or [None])[-1]
        if getattr(made, "pass_name", "") != "fuse-attention":
            return None
        message = f"`{self._site.label}` was one call before, for which torch has no fast kernel, and is written out"
        return self._index.refuse(self._site.label, "other-attention", message, *self._site.nodes)

    def _shape_refusal(self) -> Refusal | None:
        site, scores = self._site, self._site.scores
        nodes = (scores.query, scores.keys, site.value, *site.nodes, *(m.value for m in scores.masks if m.fill is None))
        known = {node: tensor_facts(node) for node in nodes}
        missing = next((node for node, facts in known.items() if facts is None), None)
        if missing is not None:
            message = f"shape and dtype of `{missing.name}` are unknown; call infer_shapes first"
            return self._index.refuse(self._site.label, "shape-unknown", message, *self._site.nodes)
        facts: dict[Node, TensorFacts] = {node: found for node, found in known.items() if found is not None}
        dtype = facts[scores.query].dtype
        other = next((node for node, found in facts.items() if found.dtype != dtype or dtype not in FLOATS), None)
        if other is not None:
            message = (
                f"node `{other.name}` of the attention is {facts[other].dtype}; all have to be float32, or float64"
            )
            return self._index.refuse(self._site.label, "unsupported-dtype", message, *self._site.nodes)
        places = {str(found.device): node for node, found in facts.items() if found.device is not None}
        if len(places) > 1:
            message = f"the attention `{site.label}` has values on {' and '.join(places)}"
            return self._index.refuse(self._site.label, "dtype-mismatch", message, *self._site.nodes)
        ranks = [facts[node].rank for node in (scores.query, scores.keys, site.value)]
        if len(set(ranks)) > 1 or ranks[0] < 3:
            message = (
                f"queries, keys and values of `{site.label}` have {ranks} dimensions; they need as many, at least 3"
            )
            return self._index.refuse(self._site.label, "other-attention", message, *self._site.nodes)
        before, after = facts[scores.calls[-1]].shape, facts[scores.calls[0]].shape
        if not same_sizes(before, after):
            message = f"a mask of `{site.label}` has more rows than the scores, {tuple(after)} and not {tuple(before)}"
            return self._index.refuse(self._site.label, "other-attention", message, *self._site.nodes)
        return None

    def _write_refusal(self) -> Refusal | None:
        site, scores = self._site, self._site.scores
        first = scores.calls[-1]
        reads = [(scores.query, first), (scores.keys, first), *((mask.value, mask.node) for mask in scores.masks)]
        for value, reader in reads:
            if self._index.effects.written_between(value, reader, site.product):
                message = f"`{value.name}` is written in place, or a mode changes, before node `{site.label}` reads it"
                return self._index.refuse(self._site.label, "mutated", message, *self._site.nodes)
        return None

    def _mask_refusal(self) -> Refusal | None:
        facts, total = tensor_facts(self._site.scores.query), Bounds(0.0, 0.0)
        assert facts is not None
        for mask in self._site.scores.masks:
            shape = tensor_facts(mask.value)
            if shape is None or shape.rank < 2:
                message = f"`{mask.value.name}` masks the scores, and has fewer than two dimensions"
                return self._index.refuse(self._site.label, "other-attention", message, *self._site.nodes)
            fill = None if mask.fill is None else self._site.values.number(mask.fill)
            if mask.fill is not None and fill not in (-float("inf"), torch.finfo(facts.dtype).min):
                message = f"node `{mask.node.name}` fills `{mask.fill}` in, neither -inf nor the smallest {facts.dtype}"
                return self._index.refuse(self._site.label, "other-attention", message, *self._site.nodes)
            bounds = self._site.values.bounds(mask.value) if fill is None else Bounds(fill, 0.0)
            spares = not bounds.fit(facts.dtype) and bounds.high <= 0
            if not (spares and self._site.values.spares_first_column(mask.value)):
                total = total.plus(bounds)
                if not total.fit(facts.dtype):
                    message = f"`{mask.value.name}` may mask a whole row of the scores of `{self._site.label}` by -inf"
                    return self._index.refuse(self._site.label, "masked-rows", message, *self._site.nodes)
        smallest = torch.finfo(facts.dtype).min
        if total.low < smallest / 2 and trains(self._index, self._site.product, ""):
            message = f"masks of `{self._site.label}` may hide whole rows, whose gradients the kernel gets wrong"
            return self._index.refuse(self._site.label, "training", message, *self._site.nodes)
        return None
