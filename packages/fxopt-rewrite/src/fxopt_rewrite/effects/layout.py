"""Whether a graph may notice that a value becomes a slice of a larger tensor's last dimension.

The users of the value and of its views are visited, each with what is known of the layout at that point:

- SLICE: the value itself, or a copy or alias of the same shape. The distance between rows is constant, and larger than
  their length: ``view`` may regroup rows or split the last dimension, but not join the two.
- PACKED: after ``contiguous()``, the layout is the same as without the slice.
- VIEW: any other view. Nothing is known of its strides, so ``view`` counts as noticing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt_rewrite.effects.rules import Effect
from fxopt_rewrite.ops import tables
from fxopt_rewrite.ops.names import MISSING, argument
from fxopt_rewrite.ops.vocabulary import called
from fxopt_rewrite.shapes.facts import same_sizes, tensor_facts
from fxopt_rewrite.shapes.kinds import attribute


class Layout(Enum):
    """What is known of a value's strides; see the module docstring."""

    SLICE = "slice"
    PACKED = "packed"
    VIEW = "view"


EffectOf = Callable[[Node], Effect]
#: How many uses are visited before the slice counts as noticed, to bound the time of a query.
_BUDGET = 20_000


def needs_own_memory(node: Node, effect_of: EffectOf, graph_module: GraphModule) -> bool:
    """Return whether the graph may notice that a value becomes a slice; see `Effects.needs_own_memory`."""
    columns = _columns_of(node, graph_module)
    seen, waiting, budget = {(node, Layout.SLICE)}, [(node, Layout.SLICE)], _BUDGET
    while waiting:
        member, layout = waiting.pop()
        budget -= len(member.users)
        if budget < 0:
            return True
        for user in member.users:
            effect = effect_of(user)
            if user.op == "output" or _notices(member, effect):
                return True
            if member not in effect.aliases:
                continue
            following = _layout_after(user, effect.operation, member, layout, columns)
            if following is None:
                return True
            if (user, following) not in seen:
                seen.add((user, following))
                waiting.append((user, following))
    return False


def _notices(member: Node, effect: Effect) -> bool:
    """Return whether a call writes a value, or may read its strides."""
    name = effect.operation
    if effect.opaque or name is None or member in effect.writes:
        return True
    private = name.startswith("_") and not name.startswith("__") and name != "_unsafe_view"
    if name in tables.STRIDE_SENSITIVE or name.startswith(tables.SENSITIVE_PREFIXES):
        return True
    return private and name not in tables.SAFE_PRIVATE_OPERATORS


def _layout_after(user: Node, name: str | None, member: Node, layout: Layout, columns: int | None) -> Layout | None:
    """Return the layout of a result that may share memory with ``member``; None if it is unknown."""
    if name in tables.SAME_LAYOUT:
        return layout
    if name == "contiguous":
        given = argument(user, None, "memory_format")
        return Layout.PACKED if len(user.args) == 1 and given in (MISSING, torch.contiguous_format) else None
    if name in {"view", "_unsafe_view", "view_as"}:
        if layout is Layout.PACKED:
            return layout
        return Layout.VIEW if layout is Layout.SLICE and _keeps_rows(user, name, member, columns) else None
    return None if name is None or name.startswith("builtins.") else Layout.VIEW  # other views take any strides


def _columns_of(node: Node, graph_module: GraphModule) -> int | None:
    """Return the size of a value's last dimension, if it is a plain number."""
    facts = tensor_facts(node)
    last: object = facts.shape[-1] if facts is not None and facts.rank > 0 else None
    if facts is None and node.op == "call_module":
        module = attribute(graph_module, str(node.target))
        last = module.out_features if type(module) is nn.Linear else None
    elif facts is None and len(node.args) > 1 and isinstance(node.args[1], Node) and node.args[1].op == "get_attr":
        weight = attribute(graph_module, str(node.args[1].target))
        target = called(node)
        is_linear = target is not None and target.name == "linear"
        last = weight.shape[0] if is_linear and isinstance(weight, Tensor) else None
    return last if isinstance(last, int) and last > 0 else None


def _keeps_rows(view: Node, name: str, member: Node, columns: int | None) -> bool:
    """Return whether a view provably splits the last dimension and regroups the others, without joining rows."""
    sizes = None if name == "view_as" else _sizes_given(view)
    if sizes is not None and any(isinstance(size, (torch.dtype, str)) for size in sizes):
        return False
    before, after = tensor_facts(member), tensor_facts(view)
    if sizes is not None and _end_with(sizes, columns):
        return True
    if before is None or after is None or after.rank <= before.rank - 1:
        return False
    proven = before.proven and after.proven
    if proven and _end_with(after.shape, columns):
        return True
    rows = before.rank - 1
    # A constant leading size may equal the example's by chance, and then -1 compensates for other inputs.
    by_chance = not proven and sizes is not None and any(isinstance(size, int) and size > 0 for size in sizes[:rows])
    return not by_chance and same_sizes(before.shape[:rows], after.shape[:rows])


def _sizes_given(view: Node) -> Sequence[object] | None:
    """Return the sizes given to a call of ``view``; None if they come as one value."""
    given = view.args[1:] or tuple(view.kwargs.values())
    if len(given) == 1 and isinstance(given[0], (list, tuple)):
        return given[0]
    return None if len(given) == 1 and isinstance(given[0], Node) else given


def _end_with(sizes: Sequence[object], columns: int | None) -> bool:
    """Return whether trailing constant sizes multiply to the number of columns."""
    product = 1
    for size in reversed(sizes):
        if not isinstance(size, int) or size <= 0 or columns is None:
            return False
        product *= size
        if product == columns:
            return True
    return False
