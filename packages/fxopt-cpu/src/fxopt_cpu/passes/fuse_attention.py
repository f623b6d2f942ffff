"""``attention(views of x @ W.T)`` -> ``merged_attention(x @ W.T)``: attention with its views and transposes as one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch.fx import Node

from fxopt_core import PassOptionError, Refusal
from fxopt_cpu.layers.attention import LARGEST_HEAD, MergedAttention, RowAttention
from fxopt_cpu.library import isa
from fxopt_cpu.passes.layouts import Axis, Layout, heads, layout_of, operation, source_of, step
from fxopt_cpu.passes.matching import REASONS, kernels_refusal, sole_user, take_out
from fxopt_cpu.passes.memory_formats import follows_strides, has_strides, hidden_strides
from fxopt_rewrite import Editor, GraphIndex, ReversibleSitePass, read_operation, same_size, tensor_facts

_NAMES = ("query", "key", "value")


@dataclass(frozen=True, eq=False)
class AttentionSite:
    """A call of attention.

    Attributes:
        node: the call.
        operands: query, key and value, or the product that has all three.
        mask: the mask, or None.
        heads: number of heads of the query, and of key and value.
        settings: the factor of the scores, and whether it is causal.
        last: the node whose value is the rows, or the call if they are not joined.
        nodes: all nodes that are removed.
        size: size of a head of the result.
        shown: whether the strides of its result are seen, and may be others than those of rows.
        taken_back: why a call that an earlier pass has made is written out again; None where it is fused.
    """

    node: Node
    operands: tuple[Node, ...]
    mask: Node | None
    heads: tuple[int, int]
    settings: tuple[float, bool]
    last: Node
    nodes: tuple[Node, ...]
    size: int
    shown: bool = False
    taken_back: str | None = None

    @property
    def label(self) -> str:
        """The name of the call."""
        return self.node.name


class FuseAttention(ReversibleSitePass[AttentionSite]):
    """``attention(views of x @ W.T)`` -> ``merged_attention(x @ W.T)``: attention with its views as one operator.

    ``scaled_dot_product_attention`` of four-dimensional float32 values becomes a `MergedAttention` where query, key and
    value are the columns of one product, as `merge-linears` leaves them, and else a `RowAttention`. Slices, views and
    transposes before it go, as do the transpose and the reshape after it that join the heads, and the repetition of
    grouped keys and values. Masks of either kind, causal masks and grouped heads are kept.

    Refused: other dtypes, dropout, heads of more than 256 numbers, sizes that are unknown, and results that are
    returned or viewed with strides other than those of rows. What
    `fuse-scaled-dot-product-attention` has made, and is refused here, is written out again where torch's kernel for it
    is slow on a CPU: of other than four dimensions, or with elements of a head that lie apart.

    Args:
        products: "float32", or "bfloat16" to round the operands of both products where the processor has AMX, from 49
            queries on.

    Source:
        Dao and others, FlashAttention, https://arxiv.org/abs/2205.14135: blocks over the columns, with a running
        maximum.

    Cost:
        One call instead of up to eleven. No tensor of the model is touched.

    >>> class Attend(torch.nn.Module):
    ...     def forward(self, x):
    ...         heads = x.view(1, 5, 6, 16).transpose(1, 2)
    ...         parts = heads[:, :2], heads[:, 2:4], heads[:, 4:]
    ...         return torch.nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(1, 5, 32)
    >>> traced = torch.export.export(Attend(), (torch.ones(1, 5, 96),)).module()
    >>> graph_module = FuseAttention()(traced)
    >>> [node.name for node in graph_module.graph.nodes if "guards" not in node.name]
    ['x', 'attention', 'output']
    >>> graph_module.get_submodule("attention")
    MergedAttention(heads=2, kv_heads=2, scale=0.25, causal=False)
    """

    reasons: ClassVar[Mapping[str, str]] = REASONS

    def __init__(self, *, products: str = "float32") -> None:
        self.products = products
        if products not in ("float32", "bfloat16"):
            raise PassOptionError(f"FuseAttention takes 'float32' or 'bfloat16' as products; not {products!r}")
        self._rounds = products == "bfloat16" and isa() == "amx"
        self.preserves_computation, self.promised_sqnr = not self._rounds, 30.0 if self._rounds else None  # type: ignore[misc]  # of the instance

    def match(self, index: GraphIndex) -> Iterator[AttentionSite]:
        """Yield the calls of attention."""
        hidden = cache(lambda: hidden_strides(index))
        for node in index.nodes:
            if operation(index, node) == "scaled_dot_product_attention":
                site = _read(index, node)
                if site.operands and site.last is node and not _has_rows(index, node):
                    site = replace(site, shown=_is_shown(index, node, site.size, hidden()))
                refusal = self.check(site, index) if _is_slow(index, node) else None
                yield site if refusal is None else replace(site, taken_back=refusal.message, nodes=(node,))

    def check(self, site: AttentionSite, index: GraphIndex) -> Refusal | None:
        """Refuse what the operators do not take, and values that are written in between."""
        if site.taken_back:
            return None
        problem = _problem(_given(index, site.node))
        if problem is not None:
            return index.refuse(site.label, problem[0], f"`{site.label}` {problem[1]}", *site.nodes)
        if site.shown:
            message = f"the strides of `{site.label}` are seen, and follow from its query's; the operator's do not"
            return index.refuse(site.label, "returned", message, *site.nodes)
        for value in (*site.operands, *([] if site.mask is None else [site.mask])):
            if index.effects.written_between(value, value, site.last):
                message = f"`{value.name}` is written in place before `{site.last.name}`"
                return index.refuse(site.label, "mutated", message, *site.nodes)
        return kernels_refusal(site.label, index, *site.nodes)

    def rewrite(self, site: AttentionSite, edit: Editor) -> None:
        """Call one module, and take out the views around it; or write the attention out again."""
        if site.taken_back:
            _write_out(site, edit)
            return
        merged = len(site.operands) == 1
        module = MergedAttention(*site.heads, *site.settings) if merged else RowAttention(*site.settings)
        module.rounded = self._rounds
        beside = _scope(edit.index, site.node)
        name = edit.add_module(f"{beside}.attention" if beside else "attention", "attention", module.eval())
        inputs = [*site.operands, *([] if site.mask is None else [site.mask])]
        width = site.heads[0] * site.size
        made = edit.call_module(name, *inputs, before=site.last, like=site.nodes[::-1], last_dim=width)
        if site.last is site.node:
            place: Any = {"before": site.last, "like": [site.node]}
            split = edit.call_function(torch.unflatten, edit.undescribed(made), -1, (-1, site.size), **place)
            made = edit.undescribed(edit.call_function(torch.transpose, edit.undescribed(split), 1, 2, **place))
        take_out(edit, site.last, made, site.nodes)


def _has_rows(index: GraphIndex, node: Node) -> bool:
    """Return whether a result's heads lie side by side in eager, whatever the strides of inputs are."""
    facts, layout = tensor_facts(node), layout_of(index, _given(index, node)["query"])
    if facts is None or layout is None or layout.base.op == "placeholder":
        return False
    heads, rows, size = facts.shape[1:]
    # The strides of contiguous (batch, rows, heads, size), with rows and heads exchanged
    return has_strides(facts, (heads * rows * size, size, heads * size, 1))


def _is_slow(index: GraphIndex, node: Node) -> bool:
    """Return whether a pass has made a call of attention for which torch has no fast kernel on a CPU."""
    source = (node.meta.get("from_node") or [None])[-1]
    values = [tensor_facts(each) for each in node.args[:3] if isinstance(each, Node)]
    known = [each for each in values if each is not None and each.stride is not None]
    if getattr(source, "pass_name", "") != "fuse-scaled-dot-product-attention" or len(known) < 3:
        return False
    on_cpu = all(each.device is None or each.device.type == "cpu" for each in known)
    return on_cpu and any(each.rank != 4 or not same_size(each.stride[-1], 1) for each in known if each.stride)


def _write_out(site: AttentionSite, edit: Editor) -> None:
    """Compute the scores, add the mask, and multiply their softmax by the values, as before the earlier pass."""
    given, node = _given(edit.index, site.node), site.node
    user = sole_user(node)
    last = user if user is not None and operation(edit.index, user) == "clone" else node
    like: Any = {"before": node, "like": [node]}

    def call(function: Any, *args: Any, **settings: Any) -> Node:
        return edit.undescribed(edit.call_function(function, *args, **settings, **like))

    scores = call(torch.matmul, given["query"], call(torch.transpose, given["key"], -2, -1))
    scores = call(torch.mul, scores, given["scale"])
    if given.get("attn_mask") is not None:
        # Masks are added: the pass that made the call gives it no boolean mask.
        scores = call(torch.add, scores, given["attn_mask"])
    take_out(edit, last, call(torch.matmul, call(torch.softmax, scores, -1), given["value"]), [node])
    edit.note(f"written out again, as torch has no fast kernel for it: {site.taken_back}")


def _scope(index: GraphIndex, node: Node) -> str:
    """Return the full name of the module that calls attention, or of the nearest one around it that is still there."""
    stack = node.meta.get("nn_module_stack")
    # torch.fx writes `name@1` for the second call of a module.
    names = [str(entry[0]).split("@")[0] for entry in stack.values()] if isinstance(stack, dict) else []
    return next((name for name in reversed(names) if name in index.modules), "")


def _given(index: GraphIndex, node: Node) -> Mapping[str, Any]:
    """Return the arguments of a call of attention by name."""
    call = read_operation(index, node)
    return {} if call is None else call.arguments


def _problem(given: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return why a call stays as it is, as (reason code, predicate)."""
    values = [given.get(name) for name in _NAMES]
    plain = all(isinstance(each, Node) for each in values) and isinstance(given.get("attn_mask"), Node | None)
    settled = type(given.get("is_causal", False)) is bool and not isinstance(given.get("scale"), Node)
    if not plain or not settled or given.get("dropout_p", 0.0) != 0.0:
        return "unsupported-call", "has dropout, settings that the graph computes, or operands that it does not"
    facts = [tensor_facts(each) for each in values if isinstance(each, Node)]
    known = [each for each in facts if each is not None]
    if len(known) < len(facts):
        return "shape-unknown", "has values of unknown shape; call infer_shapes first"
    if any(each.dtype is not torch.float32 for each in known):
        return "unsupported-dtype", f"is {known[0].dtype}; the operators take torch.float32"
    if any(each.device is not None and each.device.type not in ("cpu", "meta") for each in known):
        return "not-on-cpu", f"is on {known[0].device}"
    if any(each.rank != 4 or not all(isinstance(each.shape[dim], int) for dim in (1, 3)) for each in known):
        return "unsupported-call", "has other than four dimensions, or a computed number of heads"
    too_large = max(int(each.shape[3]) for each in known) > LARGEST_HEAD
    return ("unsupported-call", f"has heads of more than {LARGEST_HEAD} numbers") if too_large else None


def _read(index: GraphIndex, node: Node) -> AttentionSite:
    given = _given(index, node)
    if _problem(given) is not None:
        return AttentionSite(node, (), None, (0, 0), (0.0, False), node, (node,), 0)
    query, key, value = (given[name] for name in _NAMES)
    mask, scale, causal = given.get("attn_mask"), given.get("scale"), given.get("is_causal", False)
    known = [each for each in map(tensor_facts, (query, key, value)) if each is not None]
    size, width = int(known[0].shape[3]), int(known[2].shape[3])
    settings = (1 / math.sqrt(size) if scale is None else float(scale), causal)
    count = int(known[0].shape[1])
    layouts = [layout_of(index, each) for each in (query, key, value)]
    merged, after = _merged(layouts, size), _joined_after(index, node, width)
    operands: tuple[Node, ...] = query, key, value
    counts, before = (count, count), list[Node]()
    if merged is not None:
        operands, counts = merged[:1], (count, merged[1])
        before = [each for layout in layouts if layout is not None for each in layout.chain]
    else:
        grouped = [_without_repetition(index, *each) for each in zip(operands[1:], layouts[1:], strict=True)]
        if grouped[0][2] == grouped[1][2]:  # keys and values are repeated equally often
            operands = query, grouped[0][0], grouped[1][0]
            before = [*grouped[0][1], *grouped[1][1]]
    nodes = tuple(sorted({*before, node, *after}, key=index.position.__getitem__))
    return AttentionSite(node, operands, mask, counts, settings, (node, *after)[-1], nodes, width)


def _merged(layouts: list[Layout | None], size: int) -> tuple[Node, int] | None:
    """Return the product that has query, key and value as its columns, and the number of key and value heads."""
    known = [layout for layout in layouts if layout is not None]
    if len(known) < 3 or len({id(layout.base) for layout in known}) > 1:
        return None
    base = known[0].base
    found, facts = [each for layout in known if (each := heads(layout.axes)) and each[1] == size], tensor_facts(base)
    if len(found) < 3 or facts is None or facts.rank != 3:
        return None
    counts, _, repeats = zip(*found, strict=True)
    # The columns of the product are all heads of the query, then of the keys, then of the values.
    offsets = [0, counts[0] * size, (counts[0] + counts[1]) * size]
    fits = counts[1] == counts[2] and repeats[0] == 1 and repeats[1] == repeats[2]
    same = [layout.offset for layout in known] == offsets and same_size(facts.shape[2], offsets[2] + counts[2] * size)
    return (base, counts[1]) if fits and same and counts[0] % counts[1] == 0 else None


def _joined_after(index: GraphIndex, node: Node, size: int) -> list[Node]:
    """Return the nodes by which the heads come side by side, in order; none where nothing joins them."""
    layout, way, best = _heads_apart(node, size), [node], 0
    while layout is not None and (user := sole_user(way[-1])) is not None and source_of(index, user) is way[-1]:
        layout = step(index, layout, user)
        way.append(user)
        if layout is not None and _is_rows(layout):
            best = len(way)
    return way[1:best]


def _heads_apart(node: Node, size: int) -> Layout | None:
    """Return the result of attention as a reading of its rows; None where its shape is unknown."""
    facts = tensor_facts(node)
    if facts is None or not isinstance(facts.shape[1], int):
        return None
    batch, count, rows, width = facts.shape
    return Layout(node, (Axis(batch, 0), Axis(count, None, size), Axis(rows, 1), Axis(width, None, 1)))


def _is_rows(layout: Layout) -> bool:
    axes, facts = layout.axes, tensor_facts(layout.base)
    whole = [(axis.dim, axis.repeat) for axis in axes[:2]] == [(0, 1), (1, 1)]
    assert facts is not None
    return len(axes) == 3 and whole and axes[2] == Axis(facts.shape[1] * facts.shape[3], None, 1)


def _is_shown(index: GraphIndex, node: Node, size: int, hidden: set[Node]) -> bool:
    """Return whether anything but the joining of its heads depends on the strides of a result."""
    layout = _heads_apart(node, size)
    waiting = [] if layout is None else [layout]
    for layout in waiting:
        # The chain has its last node first, and is empty for the call itself.
        current = (*layout.chain, node)[0]
        for user in current.users:
            follows = follows_strides(current, user, index)
            if follows is False or (follows and user in hidden):
                continue
            following = step(index, layout, user) if source_of(index, user) is current else None
            if following is None or not (follows or _is_rows(following)):
                return True
            if not _is_rows(following):
                waiting.append(following)
    return not waiting and node not in hidden


def _without_repetition(index: GraphIndex, node: Node, layout: Layout | None) -> tuple[Node, tuple[Node, ...], int]:
    """Return grouped keys or values before they were repeated, the nodes that repeat them, and how often."""
    whole_one = (node, (), 1)
    if layout is None or len(layout.axes) != 4 or layout.axes[1].repeat == 1:
        return whole_one
    repeat = layout.axes[1].repeat
    last: Any = layout.axes[1].size
    wanted = (layout.axes[0], replace(layout.axes[1], size=last // repeat, repeat=1), *layout.axes[2:])
    for place, each in enumerate((*layout.chain, layout.base)):
        before = layout_of(index, each)
        known = None if before is None else (before.base, before.axes, before.offset)
        if known == (layout.base, wanted, layout.offset):
            return each, layout.chain[:place], repeat
    return whole_one
